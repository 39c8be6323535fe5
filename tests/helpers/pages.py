"""What tests ask an open page, and how its numbers are read."""

import base64

import numpy as np

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


def decode(coded: dict, N: int, H: int) -> np.ndarray:
    """Rows [N, H, n], NaN where absent, as the page decodes them."""
    top = 256 ** coded["bytes"] - 2
    codes = np.frombuffer(base64.b64decode(coded["codes"]), f"<u{coded['bytes']}").reshape(N, H, -1) / top
    low, high = (np.array(coded[name])[..., None] for name in ("low", "high"))
    return np.where(codes > 1, np.nan, low + (high - low) * codes ** coded["power"])


def decode_matrices(coded: dict, N: int, H: int, F: int, averages: int = 0) -> np.ndarray:
    """Frame matrices [N, H, F, F + averages]; the cells that no head has are NaN."""
    out = np.full((N, H, F * (F + averages)), np.nan)
    out[..., coded["cells"]] = decode(coded, N, H)
    return out.reshape(N, H, F, F + averages)
