//! The network of a cluster: a namespace for each machine, and the control plane's bridge that joins them. Nothing of
//! it touches the host's.

use super::layout::{Machine, Prefix};
use crate::bed::netns;

/// Set before there is any link, so that links begin with them. Addresses are ours alone: nobody else need be asked.
const SYSCTLS: [(&str, &str); 5] = [
    ("net/ipv4/ip_forward", "1"),
    ("net/ipv6/conf/all/forwarding", "1"),
    ("net/ipv6/conf/all/accept_dad", "0"),
    ("net/ipv6/conf/default/accept_dad", "0"),
    ("net/ipv4/conf/default/rp_filter", "0"),
];

/// Makes the namespaces, the links between them, and the routes to all pods.
pub(super) fn make(prefix: &Prefix) -> anyhow::Result<()> {
    let script: String = Machine::all()
        .map(|machine| format!("netns add {}\n", prefix.name(machine)))
        .collect();
    netns::ip(None, &script)?;
    for machine in Machine::all() {
        netns::inside(&prefix.netns(machine), || netns::set_sysctls(&SYSCTLS))??;
    }
    let center = Machine::ControlPlane;
    netns::ip(
        Some(&prefix.name(center)),
        "link set lo up\nlink add br0 type bridge\nlink set br0 up\n",
    )?;
    let mut script = addresses(center, "br0");
    for node in Machine::nodes() {
        let name = prefix.name(node);
        script += &format!("link add {node} type veth peer name eth0 netns {name}\nlink set {node} master br0 up\n");
    }
    netns::ip(Some(&prefix.name(center)), &(script + &routes(center)))?;
    for node in Machine::nodes() {
        let script = format!(
            "link set lo up\nlink set eth0 up\n{}route add default via {}\nroute add default via {}\n{}",
            addresses(node, "eth0"),
            center.v4(),
            center.v6(),
            routes(node)
        );
        netns::ip(Some(&prefix.name(node)), &script)?;
    }
    Ok(())
}

fn addresses(machine: Machine, link: &str) -> String {
    let (v4, v6) = (machine.v4(), machine.v6());
    format!("addr add {v4}/24 dev {link}\naddr add {v6}/64 dev {link} nodad\n")
}

/// The way from one machine to the pods of the others.
fn routes(from: Machine) -> String {
    Machine::nodes()
        .filter(|node| *node != from)
        .map(|node| {
            let [v4, v6] = node.pod_ranges();
            format!("route add {v4} via {}\nroute add {v6} via {}\n", node.v4(), node.v6())
        })
        .collect()
}
