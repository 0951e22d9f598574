"""What is shown of urls that hold keys, and of texts that repeat them."""

import pytest

from blockx.config import describe, load_config
from blockx.errors import UsageError
from blockx.redact import Secrets, redact_text, redact_url

URL = "https://user:S3CRET@node.example/v2/SECRETKEY?key=SECRET"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8545", "http://127.0.0.1:8545"),
        ("http://127.0.0.1:8545/", "http://127.0.0.1:8545"),
        (URL, "https://node.example/***"),
        ("https://node.example?key=SECRET", "https://node.example/***"),
        ("http://[::1]:8545", "http://[::1]:8545"),
        ("http://x:99999/SECRET", "(an url that cannot be read)"),
        ("postgresql://me:SECRET@db.example/prices", "postgresql://db.example/***"),
    ],
)
def test_of_an_url_only_scheme_host_and_port_are_shown(url, shown):
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    "text",
    [
        "401 for user with S3CRET",
        "no project SECRETKEY",
        "https://node.example/v2/SECRETKEY?key=SECRET is not known",
        "key=SECRET",
    ],
)
def test_secrets_are_cut_out_of_what_others_say(text):
    cut = Secrets(URL, "http://127.0.0.1:8545").cut(text)
    assert "***" in cut
    assert "SECRET" not in cut
    assert "S3CRET" not in cut


def test_quoted_secrets_are_cut_out_as_they_are_meant_too():
    cut = Secrets("https://user:a%2Fb%20cd@node.example").cut("a/b cd and a%2Fb%20cd")
    assert cut == "*** and ***"


def test_urls_without_secrets_change_no_text():
    text = "http://127.0.0.1:8545/v2/rpc: connection refused"
    assert Secrets("http://127.0.0.1:8545/v2/rpc").cut(text) == text


def test_texts_that_are_no_urls_stay():
    assert redact_text("rows.jsonl") == "rows.jsonl"
    assert redact_text("user:SECRET@node.example/SECRET") == "***@node.example"


MISTAKES = [
    f"urls: '{URL}'",
    f"urls: [{{'{URL}': 1}}]",
    f"urls: ['{URL}'], per_url: {{'{URL}': {{weigth: 1}}}}",
    f"urls: ['{URL}'], per_url: {{'{URL}x': {{weight: 1}}}}",
    f"urls: ['{URL}'], per_url: {{'{URL}': 1}}",
    f"url: '{URL}'",
    "urls: ['user:SECRET@node.example/SECRETKEY']",
    "urls: ['https://user:SECRET@:99999999/SECRETKEY']",
    f"urls: ['{URL}']], x: [",
    f"urls: ['{URL}'], urls: ['{URL}']",
    f"urls: ['{URL}', *{URL}]",
]


@pytest.mark.parametrize("chain", MISTAKES)
def test_no_mistake_in_a_configuration_shows_a_secret(tmp_path, chain):
    (tmp_path / "c.yaml").write_text(f"backends:\n  rpc:\n    dev: {{{chain}}}\n")
    with pytest.raises(UsageError) as failed:
        load_config(tmp_path / "c.yaml", {})
    assert "SECRET" not in str(failed.value).upper().replace("S3CRET", "SECRET")


def test_two_urls_of_one_host_keep_their_settings_apart(tmp_path):
    urls = [f"https://node.example/{key}" for key in ("SECRETKEY1", "SECRETKEY2")]
    settings = ", ".join(f"'{url}': {{weight: {n}}}" for n, url in enumerate(urls, 1))
    (tmp_path / "c.yaml").write_text(
        f"backends:\n  rpc:\n    dev: {{urls: {urls}, per_url: {{{settings}}}}}\n"
    )
    text = describe(load_config(tmp_path / "c.yaml", {}), {})
    assert "https://node.example/*** (url 1):" in text
    assert "https://node.example/*** (url 2):" in text
    assert "SECRET" not in text
