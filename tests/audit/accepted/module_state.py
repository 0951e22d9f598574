ROWS = []
SEEN = {}
COUNT = 0


def _(p):
    global COUNT
    COUNT += 1
    SEEN[p] = COUNT
    ROWS[0:1] = [p]
    return COUNT
