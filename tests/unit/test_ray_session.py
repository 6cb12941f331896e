"""A Ray cluster that is not there is refused in one line, before Ray tries for a minute."""

import socket

import pytest

from rollout.errors import ConfigError
from trainer.ray_session import check_reachable


def test_an_address_where_nothing_listens_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"train.ray_address={address}: nothing answers there"):
            check_reachable(address)
        taken.listen()
        check_reachable(address)


@pytest.mark.parametrize("address", ["auto", "ray://somewhere:10001", "local"])
def test_what_ray_resolves_by_itself_is_left_to_it(address: str) -> None:
    check_reachable(address)
