class BadRow(ValueError):
    def __init__(self, row):
        self.row = row

    def __str__(self):
        return f'bad {self.row}'


class Worse(BadRow, KeyError):
    pass


def _(p):
    try:
        raise Worse(p) from None
    except (Worse, TypeError) as e:
        return str(e), e.args
    except:
        raise
    else:
        return 1
    finally:
        pass
