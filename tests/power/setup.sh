# Prepares a guest of tests/vm for power cuts: the client reaches the node over loopback.
/bin/ip link set lo up
export LARDER_BIN=/bin/larder
