"""Why a cache does not hold a number, in words that figures and printed lines share."""

NO_LOGITS, NO_MASS = "no mean logits in this cache", "no mass in this cache"

NO_CONTEXT, NO_MATRIX = "no context: the queries see no earlier block", "no whole frame matrix in this cache"

NOT_IDENTIFIED = "its cells do not tell frame 0 from rows and distances"
