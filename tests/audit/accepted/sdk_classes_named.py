def _(p: Block, t: Table | None = None) -> list[Table]:
    b: Block = Block(1)
    return Table('t').get_row(1), isinstance(p, (Block, Table)), ChainState('dev', b).call('0x', b'')
