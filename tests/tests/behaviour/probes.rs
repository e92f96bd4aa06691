//! Probes by the node's kubelet reach a pod under any policy; nothing else of the host does.

use std::ffi::CStr;
use std::process::Command;

use adit_tests::bed::{AccessLine, Bed, Pod, wait_for};
use adit_tests::net::{self, Attempt, Ending, Seen};

use crate::world::{LONG, PORT, SOON, ask, echo, world};

const KUBELET: &CStr = c"kubelet";

/// Admits whoever has proven an identity, and nobody else.
const IDENTITIES_ONLY: &str = "
    name: identities-only
    namespace: shop
    scope: namespace
    action: deny
    rules:
      - from:
          - notPrincipals: ['*']
";

/// Admits nobody.
const NOBODY: &str = "
    name: nobody
    namespace: shop
    scope: namespace
    action: deny
    rules:
      - {}
";

fn probe(bed: &Bed, pod: &Pod) -> anyhow::Result<Seen> {
    let to = pod.at(PORT);
    bed.node(pod.node()).as_kubelet(KUBELET, || net::ask(to, "alive?"))
}

fn is_alive(answer: &anyhow::Result<Seen>) -> bool {
    answer
        .as_ref()
        .is_ok_and(|seen| seen.text == "alive?" && seen.ending == Ending::Fin)
}

#[test]
fn the_kubelets_probes_reach_a_pod_under_a_strict_policy_and_nothing_else_of_the_host_does() {
    let bed = world("probes").policy(IDENTITIES_ONLY).kubelet().start().unwrap();
    let (node, pod) = (bed.node("n1"), bed.pod("neighbour"));
    let _server = echo(pod, PORT);
    for to in [pod.at(PORT), pod.at6(PORT)] {
        let attempt = || net::attempt(to);
        let seen = node.as_kubelet(KUBELET, || net::ask(to, "alive?"));
        assert!(is_alive(&seen), "{to}: {seen:?}");
        let refused = |attempt: Attempt, who: &str| assert!(attempt.was_refused(), "{who} to {to}: {attempt:?}");
        refused(node.as_host_process(KUBELET, attempt).unwrap(), "outside its cgroup");
        refused(
            node.as_kubelet(c"kubelet-impostor", attempt).unwrap(),
            "another command",
        );
        refused(node.as_kubelet(c"sh", attempt).unwrap(), "another command");
        refused(node.inside(attempt).unwrap().unwrap(), "another process");
    }
    // Those who have an identity are let in as ever.
    ask(bed.pod("client"), pod.at(PORT));
}

#[test]
fn a_probe_is_logged_at_the_pods_end_with_its_author() {
    let bed = world("probe log").policy(NOBODY).kubelet().start().unwrap();
    let (node, pod) = (bed.node("n1"), bed.pod("neighbour"));
    let _server = echo(pod, PORT);
    let seen = probe(&bed, pod).unwrap();
    let source = crate::world::canonical(seen.local).to_string();
    let wanted = |line: &AccessLine| line.get("source.addr") == source;
    let line = node.wait_for_access("of the probe", SOON, wanted).unwrap();
    assert!(
        line.has(&[
            ("reporter", "destination"),
            ("path", "direct"),
            ("destination.workload", &pod.workload()),
            ("source.identity", ""),
            ("command", "kubelet"),
            ("bytes_sent", "6"),
            ("bytes_received", "6"),
            ("how", "fin"),
        ]),
        "{line:?}"
    );
    assert_ne!(line.get("pid"), "", "{line:?}");
}

#[test]
fn a_socket_that_the_kubelet_reuses_for_another_pod_is_known_anew() {
    let bed = world("probe again").policy(NOBODY).kubelet().start().unwrap();
    let (node, pod, other) = (bed.node("n1"), bed.pod("neighbour"), bed.pod("client"));
    let (to, closed) = (pod.at(PORT), other.at(PORT));
    let _server = echo(pod, PORT);
    let seen = node
        .as_kubelet(KUBELET, || {
            // Refused by the application itself: the SYN was let in. The next one's is another port's.
            let attempt = net::attempt(closed)?;
            anyhow::ensure!(attempt.connect == Some(libc::ECONNREFUSED), "{attempt:?}");
            net::ask(to, "alive?")
        })
        .unwrap();
    assert_eq!((seen.text.as_str(), seen.ending), ("alive?", Ending::Fin));
}

#[test]
fn a_kubelet_that_is_started_anew_in_a_new_cgroup_probes_on() {
    let bed = world("probe anew").policy(NOBODY).kubelet().start().unwrap();
    let (node, pod) = (bed.node("n1"), bed.pod("neighbour"));
    let _server = echo(pod, PORT);
    assert!(is_alive(&probe(&bed, pod)));
    std::fs::remove_dir(node.kubelet_cgroup()).unwrap();
    std::fs::create_dir(node.kubelet_cgroup()).unwrap();
    wait_for("probes by the new kubelet", SOON, || Ok(is_alive(&probe(&bed, pod)))).unwrap();
}

#[test]
fn a_kubelet_whose_cgroup_holds_the_pods_probes_and_no_pod_of_its_name_does() {
    let bed = world("probe from above").policy(NOBODY).build().unwrap();
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    let node = bed.node("n1");
    let above = node.pods_cgroup().parent().unwrap().to_owned();
    node.launch_with(&[&format!("--kubelet-cgroup={}", above.display())])
        .unwrap();
    node.wait_ready(LONG).unwrap();
    let pod = bed.pod("neighbour");
    let _server = echo(pod, PORT);
    let to = pod.at(PORT);
    assert!(is_alive(
        &node.as_process_of(&above, KUBELET, || net::ask(to, "alive?"))
    ));
    let daemon = node.pods_cgroup().join("daemon");
    std::fs::create_dir(&daemon).unwrap();
    let attempt = node.as_process_of(&daemon, KUBELET, || net::attempt(to)).unwrap();
    assert!(attempt.was_refused(), "{attempt:?}");
}

#[test]
fn a_probe_comes_from_the_nodes_own_address_as_network_policies_expect() {
    let bed = world("probe source").policy(IDENTITIES_ONLY).kubelet().start().unwrap();
    let (node, pod, client) = (bed.node("n1"), bed.pod("neighbour"), bed.pod("client"));
    let _server = echo(pod, PORT);
    // What a plugin for networks makes of a policy that denies by default: from the node itself only, by its address.
    let rules = "
        table inet plugin {
            chain output {
                type filter hook output priority 0; policy accept;
                oifname != pods0 accept
                ip saddr 10.244.1.1 accept
                ip6 saddr fd00:244:1::1 accept
                meta l4proto { icmp, ipv6-icmp } accept
                counter drop
            }
        }";
    let nft = |words: &[&str]| {
        let output = node
            .inside(|| Command::new("nft").args(words).output())
            .unwrap()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    nft(&[rules]);
    for to in [pod.at(PORT), pod.at6(PORT)] {
        let seen = node.as_kubelet(KUBELET, || net::ask(to, "alive?"));
        assert!(is_alive(&seen), "{to}: {seen:?}");
        // The address admits nobody by itself.
        let attempt = node.as_host_process(KUBELET, || net::attempt(to)).unwrap();
        assert!(attempt.was_refused(), "{to}: {attempt:?}");
    }
    ask(client, pod.at(PORT));
    ask(bed.pod("server"), pod.at(PORT));
    let list = nft(&["list", "ruleset"]);
    assert!(list.contains("counter packets 0 bytes 0"), "{list}");
}
