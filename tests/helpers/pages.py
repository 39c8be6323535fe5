"""What tests ask an open page."""

SHOWN = "document.getElementById('detail-title').textContent.split(' · ')[1]"


def box(browser, selector) -> tuple[float, float, float, float]:
    """x, y, width and height of an element, brought into view."""
    return browser.js(
        f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}}); "
        "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )


def text_of(browser, name) -> str:
    return browser.js(f"document.getElementById({name!r}).textContent")


def set_value(browser, name, value, event="change"):
    browser.js(
        f"(() => {{ const e = document.getElementById({name!r}); e.value = {value!r}; "
        f"e.dispatchEvent(new Event({event!r})); }})()"
    )
