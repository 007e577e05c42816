"""What a user may say of the exchange with other engines."""

import pytest

from milepost.config import EngineConfig
from milepost.errors import ConfigError


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ([], r"kv_connector_extra_config=\[\]: use a JSON object"),
        ({"backend": ["UCX"]}, "unknown field 'backend'"),
        ({"backends": "UCX"}, "backends='UCX': use a list"),
        ({"backends": []}, r"backends=\[\]: use a list"),
        ({"transport": "rdma"}, "transport='rdma': use one of nixl, socket"),
        ({"peers": 7}, r"peers=7: use a list of addresses and networks, or 'any'"),
        ({"peers": "10.0.0.8"}, r"peers='10\.0\.0\.8': use a list of addresses and networks"),
        ({"peers": [7]}, r"peers=7: use an address or a network"),
        ({"peers": ["prefill.svc"]}, r"peers='prefill\.svc': use an address or a network"),
        ({"peers": ["10.0.0.7/24"]}, r"peers='10\.0\.0\.7/24': .*has host bits set"),
        ({"timeout_s": float("inf")}, r"timeout_s=inf: use more than 0, and 86400 at most"),
        ({"lease_s": 0}, "lease_s=0: use more than 0"),
        ({"lend_share": 1.5}, r"lend_share=1\.5: use 1 or less"),
        ({"max_transfers": 0.5}, r"max_transfers=0\.5: use a whole number"),
    ],
)
def test_a_mistake_in_the_extra_config_is_named(extra: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(kv_transfer_config={"kv_connector_extra_config": extra})  # type: ignore[arg-type]
