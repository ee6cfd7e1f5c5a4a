# Prepares a guest of tests/vm for tests of RDMA: two soft-RoCE devices (rdma_rxe) over the two ends of a veth pair. They are rxe0
# (10.77.0.1 on ve0) and rxe1 (10.77.1.1 on ve1).
export LARDER_RDMA_VM=1

# MTU 4500 leaves room for the largest RDMA MTU, 4096.
/bin/ip link add ve0 mtu 4500 address 02:00:00:00:00:01 type veth peer name ve1 mtu 4500 address 02:00:00:00:00:02
for end in all ve0 ve1; do
    echo 1 >/proc/sys/net/ipv4/conf/$end/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$end/rp_filter
done
# Both addresses belong to this machine, so the kernel would route packets between them over `lo`, where no RDMA device listens.
# These rules send a packet out of the device it was sent from (tables 10 and 11). It is delivered locally only on arrival at a device.
/bin/ip -batch - <<'IP'
link set lo up
addr add 10.77.0.1/24 dev ve0
addr add 10.77.1.1/24 dev ve1
link set ve0 up
link set ve1 up
neigh add 10.77.1.1 lladdr 02:00:00:00:00:02 nud permanent dev ve0
neigh add 10.77.0.1 lladdr 02:00:00:00:00:01 nud permanent dev ve1
route add 10.77.1.1 dev ve0 table 10
route add 10.77.0.1 dev lo table 10
route add 10.77.0.1 dev ve1 table 11
route add 10.77.1.1 dev lo table 11
rule add pref 1 iif ve0 lookup local
rule add pref 2 iif ve1 lookup local
rule add pref 3 oif ve0 lookup 10
rule add pref 4 oif ve1 lookup 11
rule add pref 5 lookup local
rule del pref 0
IP
# Packets of one connection must arrive in order: soft-RoCE answers others with retransmissions, which may come after their grant has
# ended. Without this, each processor has a queue of received packets of its own.
for end in ve0 ve1; do echo 1 >/sys/class/net/$end/queues/rx-0/rps_cpus; done
rdma link add rxe0 type rxe netdev ve0
rdma link add rxe1 type rxe netdev ve1
