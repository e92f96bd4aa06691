//! How the bed's network looks: addresses and the `ip` commands that make it so.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The device that leads to the other nodes, in each node.
pub(super) const LINK: &str = "wan0";

/// Set in every namespace before it has links. No duplicate address detection: addresses work at once. Strict reverse
/// path filtering, because hosts have it and a proxy must live with it.
pub(super) const SYSCTLS: &[(&str, &str)] = &[
    ("net/ipv6/conf/all/disable_ipv6", "0"),
    ("net/ipv6/conf/default/disable_ipv6", "0"),
    ("net/ipv6/conf/all/accept_dad", "0"),
    ("net/ipv6/conf/default/accept_dad", "0"),
    ("net/ipv6/conf/default/accept_ra", "0"),
    ("net/ipv4/conf/all/rp_filter", "1"),
    ("net/ipv4/conf/default/rp_filter", "1"),
];

/// Set in every node: it forwards between its pods and the other nodes.
pub(super) const NODE_SYSCTLS: &[(&str, &str)] = &[("net/ipv4/ip_forward", "1"), ("net/ipv6/conf/all/forwarding", "1")];

/// The address of node `node` (from 1) on the link.
pub(super) fn node_v4(node: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 18, 0, node)
}

/// The same for IPv6.
pub(super) fn node_v6(node: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x18, 0, 0, 0, 0, 0, node.into())
}

/// Address `host` in the pod range of node `node`; 1 is the node's own.
pub(super) fn pod_v4(node: u8, host: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, node, host)
}

/// The same for IPv6. The group reads like the decimal number: fd00:244:12:: is node 12's.
pub(super) fn pod_v6(node: u8, host: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x244, decimal_digits_as_hex(node), 0, 0, 0, 0, host.into())
}

/// Virtual address `number` (from 1) of services.
pub(super) fn service_v4(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 0, number)
}

/// The same for IPv6.
pub(super) fn service_v6(number: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, number.into())
}

/// A pod's end: the namespace and how many hosts' addresses it has, from which on.
#[derive(Debug)]
pub(super) struct PodLink<'a> {
    pub(super) netns: &'a str,
    pub(super) first_host: u8,
    pub(super) hosts: u8,
}

/// The script for node `node` of `nodes`: its bridge, the pods' links, the link to the other nodes and the routes.
pub(super) fn node_script(node: u8, nodes: &[String], switch: Option<&str>, pods: &[PodLink<'_>]) -> String {
    let mut script = String::from("link set lo up\nlink add pods0 type bridge forward_delay 0 mcast_snooping 0\n");
    let _ = writeln!(script, "address add {}/24 dev pods0", pod_v4(node, 1));
    let _ = writeln!(
        script,
        "address add {}/64 dev pods0 nodad\nlink set pods0 up",
        pod_v6(node, 1)
    );
    for (index, pod) in pods.iter().enumerate() {
        let _ = writeln!(
            script,
            "link add pod{index} type veth peer name eth0 netns {}",
            pod.netns
        );
        let _ = writeln!(script, "link set pod{index} master pods0 up");
    }
    match switch {
        Some(switch) => {
            let _ = writeln!(script, "link add {LINK} type veth peer name node{node} netns {switch}");
        }
        None if node == 1 && nodes.len() == 2 => {
            let _ = writeln!(script, "link add {LINK} type veth peer name {LINK} netns {}", nodes[1]);
        }
        None => {}
    }
    script
}

/// The second script for a node, when all links are there.
pub(super) fn routes_script(node: u8, nodes: u8) -> String {
    if nodes < 2 {
        // Still an address, for the CA; not on a dummy device, which not every kernel has.
        return format!(
            "link add {LINK} type bridge\naddress add {}/24 dev {LINK}\naddress add {}/64 dev {LINK} nodad\n\
             link set {LINK} up\n",
            node_v4(node),
            node_v6(node)
        );
    }
    let mut script = String::new();
    let _ = writeln!(script, "address add {}/24 dev {LINK}", node_v4(node));
    let _ = writeln!(
        script,
        "address add {}/64 dev {LINK} nodad\nlink set {LINK} up",
        node_v6(node)
    );
    for other in (1..=nodes).filter(|other| *other != node) {
        let _ = writeln!(script, "route add {}/24 via {}", pod_v4(other, 0), node_v4(other));
        let _ = writeln!(script, "route add {}/64 via {}", pod_v6(other, 0), node_v6(other));
    }
    script
}

/// The script for the switch between more than two nodes.
pub(super) fn switch_script(nodes: u8) -> String {
    let mut script =
        String::from("link add switch0 type bridge forward_delay 0 mcast_snooping 0\nlink set switch0 up\n");
    for node in 1..=nodes {
        let _ = writeln!(script, "link set node{node} master switch0 up");
    }
    script
}

/// The script for a pod.
pub(super) fn pod_script(node: u8, pod: &PodLink<'_>, ipv6: bool) -> String {
    let mut script = String::from("link set lo up\n");
    for host in pod.first_host..pod.first_host + pod.hosts {
        let _ = writeln!(script, "address add {}/24 dev eth0", pod_v4(node, host));
        if ipv6 {
            let _ = writeln!(script, "address add {}/64 dev eth0 nodad", pod_v6(node, host));
        }
    }
    let _ = writeln!(script, "link set eth0 up\nroute add default via {}", pod_v4(node, 1));
    if ipv6 {
        let _ = writeln!(script, "route add default via {}", pod_v6(node, 1));
    }
    script
}

fn decimal_digits_as_hex(number: u8) -> u16 {
    let number = u16::from(number);
    ((number / 100) << 8) | ((number / 10 % 10) << 4) | (number % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_nodes_read_alike_in_both_families() {
        assert_eq!(pod_v4(12, 3).to_string(), "10.244.12.3");
        assert_eq!(pod_v6(12, 3).to_string(), "fd00:244:12::3");
    }
}
