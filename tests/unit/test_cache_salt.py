from hypothesis import given
from hypothesis import strategies as st

from services.cache_salt import salted

LOADS = st.integers(0, 10_000)
OWN = st.none() | st.text(min_size=1, max_size=128) | st.just("\ud800")


@given(first=LOADS, second=LOADS, salt=OWN, other=OWN)
def test_salts_are_the_same_only_for_the_same_weights_and_the_same_own_salt(
    first: int, second: int, salt: str | None, other: str | None
) -> None:
    assert (salted(first, salt) == salted(second, other)) == ((first, salt) == (second, other))


@given(loads=LOADS, salt=OWN)
def test_vllm_takes_every_salt(loads: int, salt: str | None) -> None:
    assert 0 < len(salted(loads, salt)) <= 128
    assert salted(loads, salt).isalnum()
