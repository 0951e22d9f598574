from typing import Any, Dict, List, Literal, Optional, Union


def _(p: Dict[str, Any], n: Optional[int] = None, *a: 'Later', k: Literal['x'] = 'x') -> Union[int, List[int]]:
    x: list[int] = []
    y: int
    return x
