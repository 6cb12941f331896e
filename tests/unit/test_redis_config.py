import pytest
from pydantic import ValidationError

from rollout.config import RedisConfig, redacted


@pytest.mark.parametrize(
    "url",
    [
        *("redis://localhost:6379/2", "redis://127.0.0.1:6379/", "redis://[::1]:7", "unix:///tmp/s?db=1"),
        *("rediss://u:p@h", "redis://:p@h", "redis://h?password=p", "rediss://h?ssl_certfile=/c&ssl_keyfile=/k"),
    ],
)
def test_addresses_of_a_server_are_accepted(url: str) -> None:
    assert RedisConfig(url=url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "redis://h:notaport",
        "redis://",
        "unix://",
        "http://h:1",
        "redis://h/mydb",
        "redis://h/1/2",
    ],
)
def test_a_malformed_address_is_refused_with_the_form_expected(url: str) -> None:
    with pytest.raises(ValidationError, match="expected redis://HOST:PORT"):
        RedisConfig(url=url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@h:1/0", "redis://***@h:1/0"),
        ("redis://secret@h", "redis://***@h"),
        ("redis://u:sec@ret/secret@h", "redis://***@h"),
        ("unix://u:secret@/tmp/s", "unix://***@/tmp/s"),
        ("unix:///tmp/s?username=secret&password=secret&db=1", "unix:///tmp/s?username=***&password=***&db=1"),
        ("u:secret@h:6379", "***@h:6379"),
        ("redis://h:1", "redis://h:1"),
    ],
)
def test_messages_show_the_address_without_its_login(url: str, shown: str) -> None:
    assert redacted(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:6379/0",
        "redis://10.0.0.3",
        "rediss://h",
        "redis://u@h",
        "redis://0.0.0.0",
        "redis://h?ssl_certfile=/c",
    ],
)
def test_a_server_elsewhere_that_takes_anybody_is_refused_unless_that_is_meant(url: str) -> None:
    with pytest.raises(ValidationError, match=r"redis\.url=.* has no password.*redis\.no_password"):
        RedisConfig(url=url)
    assert RedisConfig(url=url, no_password=True).url == url
