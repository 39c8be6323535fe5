"""Names of runs made of any prompts."""

from hypothesis import given
from hypothesis import strategies as st

from experiments.running.cli import slugs_of


@given(prompts=st.lists(st.text(min_size=1, max_size=100), unique=True, max_size=8))
def test_slugs_are_file_names_and_differ(prompts):
    slugs = slugs_of(prompts)
    assert len(set(slugs.values())) == len(prompts)
    for slug in slugs.values():
        assert slug and not {"/", "\0"} & set(slug) and not slug.startswith(".") and len(slug.encode()) < 100
