"""Contract calls by signature, logs in parts, and web3.py over a provider that plays the node."""

from typing import Any

import pytest

from blockx.errors import TOO_MUCH, ReadError, RevertedError
from blockx.sdk import abi, leafage
from blockx.sdk import provider as seam
from blockx.sdk.leafage import ChainState

ADDRESS = "0x" + "ab" * 20


class FakeNode:
    """A provider: ``answer(method, request)`` makes each result or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def read_req(self, backend: str, operation: str, params: Any, *, cache_key: Any = None) -> Any:
        assert (backend, cache_key) == ("rpc", None)
        self.asked.append((operation, params))
        return self.answer(operation, params)


@pytest.fixture
def node():
    tokens = []

    def make(answer: Any) -> FakeNode:
        fake = FakeNode(answer)
        tokens.append(seam.set_provider(fake))
        return fake

    yield make
    for token in reversed(tokens):
        seam.reset_provider(token)


# ---- signatures ----------------------------------------------------------------------------------

KNOWN = [
    ("balanceOf(address)", "70a08231"),
    ("transferFrom(address,address,uint256)", "23b872dd"),
    ("name()", "06fdde03"),
    ("swap(bool,uint256)", "c037646a"),
    ("getReserves()", "0902f1ac"),
    ("multicall((address,bytes)[])", "caa5c23f"),
]


@pytest.mark.parametrize(("text", "selector"), KNOWN)
def test_a_selector_is_the_hash_of_name_and_types(text: str, selector: str) -> None:
    assert abi.parse(text).selector.hex() == selector
    assert abi.parse(f" {text.replace(',', ' , ')} ( uint256 )").selector.hex() == selector


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("f()", (), None),
        ("f()()", (), ()),
        ("f(uint256,(bool,bytes)[2])(address)", ("uint256", "(bool,bytes)[2]"), ("address",)),
        ("f((uint8,(int256,string)),bytes32[])", ("(uint8,(int256,string))", "bytes32[]"), None),
    ],
)
def test_a_signature_is_taken_apart(text: str, inputs: Any, outputs: Any) -> None:
    signature = abi.parse(text)
    assert (signature.inputs, signature.outputs) == (inputs, outputs)


@pytest.mark.parametrize(
    "text",
    ["(", "f", "f(", "f)", "f(a", "1f()", "()", "f()()()", "f(uint256)x", "f(uint257)", "f(,)", "f(int)(wei)"],
)  # fmt: skip
def test_what_is_no_signature_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"signature looks like|is no type of the ABI"):
        abi.parse(text)


def word(value: int) -> str:
    return f"{value % 2**256:064x}"


@pytest.mark.parametrize(
    ("signature", "args", "data", "answer", "value"),
    [
        (
            "balanceOf(address)(uint256)",
            (ADDRESS,),
            "70a08231" + "00" * 12 + "ab" * 20,
            word(2**256 - 1),
            2**256 - 1,
        ),
        ("name()(string)", (), "06fdde03", word(32) + word(3) + "61c3a4".ljust(64, "0"), "aä"),
        ("token0()(address)", (), None, "00" * 12 + "CD" * 20, "0x" + "cd" * 20),
        ("f(int256)(int256)", (-5,), None, word(-7), -7),
        ("f(bool,bytes)(bool,bytes2)", (True, b"\1"), None, word(1) + "beef".ljust(64, "0"), (True, b"\xbe\xef")),
        ("f((uint8,bool)[])(uint8[])", ([(1, True)],), None, word(32) + word(1) + word(9), (9,)),
        ("f()()", (), None, "", None),
        ("f()", (), None, "0102", b"\1\2"),
    ],
)  # fmt: skip
def test_a_call_by_signature_encodes_and_decodes(
    node: Any, signature: str, args: Any, data: str | None, answer: str, value: Any
) -> None:
    fake = node(lambda *_: f"0x{answer}")
    assert ChainState("dev", 7).call(ADDRESS, signature, *args) == value
    ((method, request),) = fake.asked
    assert (method, request["block"], request["params"][0]["to"]) == ("eth_call", 7, ADDRESS)
    if data is not None:
        assert request["params"][0]["data"] == f"0x{data}"


@pytest.mark.parametrize(
    ("signature", "args", "text"),
    [
        ("f(uint256)", (), "takes 1 arguments, not 0"),
        ("f(uint8)", (256,), "256"),
        ("f(uint256)", ("1",), "f\\(uint256\\): "),
        ("f(address)", ("0x12",), "f\\(address\\): "),
        ("f(bytes)", (5,), "f\\(bytes\\): "),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_asked(
    node: Any, signature: str, args: Any, text: str
) -> None:
    fake = node(lambda *_: "0x")
    with pytest.raises(ValueError, match=text):
        ChainState("dev", 7).call(ADDRESS, signature, *args)
    assert fake.asked == []


def test_arguments_without_a_signature_are_refused() -> None:
    with pytest.raises(TypeError, match="arguments need a signature"):
        ChainState("dev", 7).call(ADDRESS, "0x12", 5)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("0x", "f()(uint256): the answer 0x is no (uint256); is there a contract with this function?"),
        ("0x12", "f()(uint256): the answer 0x12 is no (uint256)"),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_malformed(node: Any, answer: str, text: str) -> None:
    node(lambda *_: answer)
    with pytest.raises(ReadError) as caught:
        ChainState("dev", 7).call(ADDRESS, "f()(uint256)")
    assert (str(caught.value), caught.value.kind) == (text, "malformed")


# ---- logs in parts -------------------------------------------------------------------------------


def logs_of(limit: int) -> Any:
    """A node that has one log a block and refuses more than ``limit`` blocks."""

    def answer(_method: str, request: Any) -> Any:
        (filter_,) = request["params"]
        first, last = int(filter_["fromBlock"], 16), int(filter_["toBlock"], 16)
        if last - first + 1 > limit:
            raise ReadError(f"eth_getLogs: query returned more than 10000 results; {TOO_MUCH}")
        return [{"blockNumber": hex(n)} for n in range(first, last + 1)]

    return answer


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 99, 100, 1_000])
def test_a_range_that_is_too_much_is_asked_for_in_parts(node: Any, limit: int) -> None:
    fake = node(logs_of(limit))
    logs = ChainState("dev", 7).get_logs(ADDRESS, from_block=100, to_block=199)
    assert [int(log["blockNumber"], 16) for log in logs] == list(range(100, 200))
    assert len(fake.asked) <= 8 + 2 * -(-100 // limit)


def test_one_block_that_is_too_much_is_an_error(node: Any) -> None:
    node(logs_of(0))
    with pytest.raises(ReadError, match=TOO_MUCH):
        ChainState("dev", 7).get_logs(from_block=1, to_block=8)


def test_another_error_is_not_split(node: Any) -> None:
    def fail(*_: Any) -> Any:
        raise ReadError("eth_getLogs: no")

    fake = node(fail)
    with pytest.raises(ReadError, match="no"):
        ChainState("dev", 7).get_logs(from_block=1, to_block=8)
    assert len(fake.asked) == 1


# ---- web3 ----------------------------------------------------------------------------------------


def test_without_web3_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "web3", None)
    monkeypatch.delitem(__import__("sys").modules, "blockx.sdk.web3_provider", raising=False)
    with pytest.raises(ImportError, match="web3"):
        leafage.web3("dev", 5)


def test_web3_reads_at_the_block_of_its_state(node: Any) -> None:
    answers = {"eth_getBalance": hex(5), "eth_chainId": "0x1"}
    fake = node(lambda method, _request: answers[method])
    w3 = leafage.web3("dev", 7)
    address = w3.to_checksum_address(ADDRESS)
    assert (w3.eth.get_balance(address), w3.eth.get_balance(address, 3)) == (5, 5)
    assert (w3.eth.block_number, w3.is_connected()) == (7, True)
    assert [request.get("block") for method, request in fake.asked if "Balance" in method] == [7, 3]


def test_a_revert_is_web3s_own_exception(node: Any) -> None:
    from web3.exceptions import ContractLogicError

    def revert(method: str, _request: Any) -> Any:
        if method == "eth_chainId":  # web3 asks before its first call
            return "0x1"
        raise RevertedError("eth_call: execution reverted: no", reason="no", data=b"")

    node(revert)
    with pytest.raises(ContractLogicError, match="no"):
        leafage.web3("dev", 7).eth.call({"to": "0x" + "00" * 20})
