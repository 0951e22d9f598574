def _(p):
    def counter():
        total = 0
        def add(k):
            nonlocal total
            total += k
            return total
        return add
    return counter()(1)
