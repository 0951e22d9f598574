"""The generated messages are those of the ``.proto`` beside them."""

from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTO = "blockx/backends/proto/blockdb.proto"


@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi"])
def test_generating_again_changes_nothing(tmp_path: Path, suffix: str) -> None:
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main(["protoc", f"-I{ROOT}", *out, PROTO]) == 0
    name = PROTO.replace(".proto", suffix)
    assert (tmp_path / name).read_text() == (ROOT / name).read_text()
