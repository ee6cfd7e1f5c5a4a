"""Mooncake's store client on a Larder store. It takes the place of Mooncake's package, so install only one of them."""
