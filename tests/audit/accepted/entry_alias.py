def compute(p):
    return p

_ = compute
