//! A proxy hands over to the next one while everything goes on.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use adit_tests::bed::{Bed, Node, Pod, PodSpec, Running, Stage, wait_for};
use adit_tests::net::{self, Outcome, Steady};
use nix::sys::signal::Signal;

use crate::world::{LONG, PORT, SOON, ask, assert_refused, echo, is_answered, world};

/// How often the proxy is replaced.
const UPGRADES: usize = 10;

/// What each of seven servers is loaded with: together 500 new connections a second and more, and 203 that stay.
const LOAD: Steady = Steady {
    makers: 3,
    maker_pause: Duration::from_millis(25),
    talkers: 29,
    talker_pause: Duration::from_millis(40),
};

fn begin(from: &Pod, servers: Vec<SocketAddr>) -> Running<Outcome> {
    from.serve(move |stage| LOAD.run(stage, &servers)).unwrap()
}

#[test]
fn upgrades_under_load_lose_nothing() {
    under_load("upgrade", |node| {
        for _ in 0..UPGRADES {
            node.upgrade(&[]).unwrap();
            std::thread::sleep(Duration::from_millis(500));
        }
    });
}

#[test]
fn upgrades_and_downgrades_across_a_change_of_layout_lose_nothing() {
    under_load("layouts", |node| {
        let layout = |version: u32| format!("--layout={version}");
        for version in [1_000, 1_001, 1_000] {
            node.upgrade(&[&layout(version)]).unwrap();
            let only = || {
                let names = std::fs::read_dir(node.bpf_dir()).unwrap().flatten();
                let names: Vec<_> = names.map(|entry| entry.file_name()).collect();
                Ok(names == [format!("v{version}").as_str()])
            };
            wait_for("the other layout to be removed", SOON, only).unwrap();
            std::thread::sleep(Duration::from_millis(500));
        }
        node.upgrade(&[]).unwrap();
    });
}

/// Has everything go on while `change` is made to the first node.
fn under_load(name: &str, change: impl FnOnce(&Node)) {
    let bed = world(name).start().unwrap();
    let pod = |name: &str| bed.pod(name);
    let (client, neighbour, server, outsider) = (pod("client"), pod("neighbour"), pod("server"), pod("outsider"));
    let _servers: Vec<_> = bed.pods().iter().map(|pod| echo(pod, PORT)).collect();
    let node = bed.node("n1");
    let loads = [
        // Through the tunnel, to the neighbour and to nobody's pod.
        (
            "from a pod",
            begin(client, vec![server.at(PORT), neighbour.at(PORT), outsider.at(PORT)]),
        ),
        // Through the tunnel, inwards.
        (
            "from a pod elsewhere",
            begin(server, vec![client.at(PORT), client.at6(PORT)]),
        ),
        // In plaintext.
        (
            "from outside",
            begin(outsider, vec![client.at(PORT), neighbour.at6(PORT)]),
        ),
    ];
    std::thread::sleep(Duration::from_millis(500));
    change(node);
    for (what, running) in loads {
        running.proceed().unwrap();
        let outcome = running.join(LONG).unwrap();
        println!("{what}: {} made, {} exchanges", outcome.made, outcome.exchanges);
        assert!(outcome.made > 500 && outcome.exchanges > 500, "{what}: {outcome:?}");
        assert_eq!(outcome.losses, Vec::<String>::new(), "{what}");
    }
    // The predecessors leave now that nothing of theirs is open, and take nothing with them.
    node.wait_left(LONG).unwrap();
    ask(client, server.at(PORT));
    ask(server, client.at(PORT));
    ask(outsider, client.at6(PORT));
}

/// A connection that is open, and says so once more when it is told to.
fn stay(client: &Pod, to: SocketAddr) -> Running<()> {
    let talk = move |stage: &Stage| {
        let mut stream = net::connect(to)?;
        stream.write_all(b"here")?;
        stage.reached(net::read_text(&mut stream, 4)?)?;
        stage.hold()?;
        stream.write_all(b"still here")?;
        stage.reached(net::read_text(&mut stream, 10)?)
    };
    client.serve(talk).unwrap()
}

#[test]
fn connections_within_the_node_go_on_while_a_successor_follows_a_proxy_that_was_told_to_stop() {
    const NEIGHBOURS: usize = 10;
    const LOAD: Steady = Steady {
        makers: 1,
        maker_pause: Duration::from_millis(4),
        talkers: 1,
        talker_pause: Duration::from_millis(20),
    };
    let bed = (0..NEIGHBOURS).fold(world("within"), |bed, number| {
        bed.pod("n1", PodSpec::new(&format!("p{number}")).account("shop/neighbour"))
    });
    // By source: the successor numbers identities anew, and is asked for what its predecessor's verdicts permitted.
    let only_known = "{name: only-known, namespace: shop, scope: namespace, action: allow, \
        rules: [{from: [{namespaces: [shop]}]}]}";
    let bed = bed.policy(only_known).start().unwrap();
    let neighbours = || (0..NEIGHBOURS).map(|number| bed.pod(&format!("p{number}")));
    let _servers: Vec<_> = neighbours().map(|pod| echo(pod, PORT)).collect();
    let to: Vec<SocketAddr> = neighbours().map(|pod| pod.at(PORT)).collect();
    let loads: Vec<Running<Outcome>> = ["client", "neighbour"]
        .map(|from| {
            let to = to.clone();
            // What the kernel has no verdict for yet would be carried by the proxy that stops.
            to.iter().for_each(|to| drop(ask(bed.pod(from), *to)));
            std::thread::sleep(Duration::from_millis(300));
            bed.pod(from).serve(move |stage| LOAD.run(stage, &to)).unwrap()
        })
        .into();
    let node = bed.node("n1");
    let _server = echo(bed.pod("server"), PORT);
    let mut open = Vec::new();
    for _ in 0..4 {
        // It stays for this, but takes nothing new.
        open.push(stay(bed.pod("client"), bed.pod("server").at(PORT)));
        node.signal(Signal::SIGTERM).unwrap();
        wait_for("new tunnels to be refused", SOON, || {
            Ok(!is_answered(bed.pod("client"), bed.pod("server").at(PORT)))
        })
        .unwrap();
        node.upgrade(&[]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    }
    for load in loads {
        load.proceed().unwrap();
        let outcome = load.join(LONG).unwrap();
        assert!(outcome.made > 500 && outcome.exchanges > 500, "{outcome:?}");
        assert_eq!(outcome.losses, Vec::<String>::new());
    }
    for mut open in open {
        open.proceed().unwrap();
        assert_eq!(open.stage::<String>(SOON).unwrap(), "still here");
        open.join(SOON).unwrap();
    }
}

#[test]
fn a_proxy_that_has_handed_over_leaves_when_its_last_connection_has_ended() {
    let bed = world("leaving").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    let mut open = stay(client, to);
    let node = bed.node("n1");
    node.upgrade(&[]).unwrap();
    assert!(
        node.wait_left(Duration::from_secs(5)).is_err(),
        "an open connection keeps it"
    );
    open.proceed().unwrap();
    assert_eq!(open.stage::<String>(SOON).unwrap(), "still here");
    open.join(SOON).unwrap();
    node.wait_left(SOON).unwrap();
    ask(client, to);
}

#[test]
fn a_successor_that_cannot_start_leaves_the_one_in_charge() {
    let bed = world("failed upgrade").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(client, PORT)];
    let node = bed.node("n1");
    let pid = node.pid();
    let other_root = bed.dir().join("other.pem");
    std::fs::write(&other_root, OTHER_ROOT).unwrap();
    let other_root = format!("--ca-root={}", other_root.display());
    for (broken, why) in [
        ("--ca-root=/nonexistent", "/nonexistent"),
        ("--pods-cgroup=/nonexistent", "/nonexistent"),
        ("--mesh-file=/nonexistent", "/nonexistent"),
        // Found out only by asking the authority.
        (&other_root, "stays in charge"),
    ] {
        let error = format!("{:#}", node.upgrade(&[broken]).unwrap_err());
        assert!(error.contains("ended") && error.contains(why), "{broken}: {error}");
        assert_eq!(node.pid(), pid);
        assert!(node.is_running());
        ask(client, server.at(PORT));
        ask(server, client.at(PORT));
    }
    // One that fails after it has asked the other to keep still: it still reconciles.
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != "neighbour"))
        .unwrap();
    node.wait_for_log("neighbour has left", SOON).unwrap();
    node.upgrade(&[]).unwrap();
    ask(client, server.at(PORT));
}

#[test]
fn a_successor_that_dies_half_way_loses_to_the_one_in_charge() {
    let bed = world("half way").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(client, PORT)];
    let node = bed.node("n1");
    // As a successor that puts its listeners in place of the other's and dies before the last word.
    let mut control = std::os::unix::net::UnixStream::connect(node.run_dir().join("control.sock")).unwrap();
    control.write_all(b"freeze\n").unwrap();
    let mut answer = [0; 10];
    control.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"ok frozen\n");
    let listeners = std::fs::read_dir(node.pins_dir().unwrap().join("pods"))
        .unwrap()
        .count();
    assert_eq!(listeners, 2);
    // Frozen: what the mesh says waits.
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != "neighbour"))
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        std::fs::read_dir(node.pins_dir().unwrap().join("pods"))
            .unwrap()
            .count(),
        2
    );
    drop(control);
    node.wait_for_log("stays in charge", SOON).unwrap();
    node.wait_for_log("neighbour has left", SOON).unwrap();
    ask(client, server.at(PORT));
    ask(server, client.at(PORT));
}

#[test]
fn a_successor_takes_over_from_one_that_drains_after_a_signal() {
    let bed = world("late successor").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(client, PORT)];
    let to = server.at(PORT);
    let mut open = stay(client, to);
    let node = bed.node("n1");
    node.signal(Signal::SIGTERM).unwrap();
    node.wait_for_log("draining", SOON).unwrap();
    wait_for("new connections to be refused", SOON, || Ok(!is_answered(client, to))).unwrap();
    assert_refused(client, to);
    node.upgrade(&[]).unwrap();
    ask(client, to);
    wait_for("the way in", SOON, || Ok(is_answered(server, client.at(PORT)))).unwrap();
    open.proceed().unwrap();
    assert_eq!(open.stage::<String>(SOON).unwrap(), "still here");
    node.wait_left(LONG).unwrap();
}

#[test]
fn uninstall_beside_proxies_that_have_been_told_to_stop_frees_the_pods_and_what_is_open_goes_on() {
    for wait in ["--await-successor=60s", "--await-successor=0s"] {
        uninstall_beside(wait);
    }
}

fn uninstall_beside(wait: &str) {
    let bed = world("uninstall beside").kubelet().node_argument(wait).start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    let mut open = stay(client, to);
    for node in bed.nodes() {
        node.signal(Signal::SIGTERM).unwrap();
        node.uninstall().unwrap();
        assert!(!node.bpf_dir().exists());
        assert!(node.is_running(), "it carries what is open");
    }
    ask(client, to);
    open.proceed().unwrap();
    assert_eq!(open.stage::<String>(SOON).unwrap(), "still here");
    open.join(SOON).unwrap();
    for node in bed.nodes() {
        assert!(node.wait_ended(LONG).unwrap().success());
        let lines = node.access_log();
        assert_eq!(lines.len(), 1, "nobody carried what came later: {lines:?}");
    }
}

#[test]
fn uninstall_is_refused_while_a_proxy_runs() {
    let bed: Bed = world("refuse uninstall").start().unwrap();
    let error = bed.node("n1").uninstall().unwrap_err().to_string();
    assert!(error.contains("stop it first") && error.contains("pid"), "{error}");
}

/// The root of somebody else.
const OTHER_ROOT: &str = "\
-----BEGIN CERTIFICATE-----
MIIBhjCCASugAwIBAgIUDJ0EmuTn6ss9PN1tBdxdBxVq3e0wCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMYW5vdGhlciByb290MCAXDTI2MTEyOTIzMjQwN1oYDzIxMjYx
MTA1MjMyNDA3WjAXMRUwEwYDVQQDDAxhbm90aGVyIHJvb3QwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAARMqp1FdS2DpbKJrXnVmJQa1mD9csHImRkKpD7C6QVTkUOQ
d46htefAko6tmWL4bNXEhT23oK75i+8wVBZji4t2o1MwUTAdBgNVHQ4EFgQUDU4N
E/gfQ6ssBNYUp5gLYxxiltgwHwYDVR0jBBgwFoAUDU4NE/gfQ6ssBNYUp5gLYxxi
ltgwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA9PX0+PcimwIQ
rX8Eq1WAdjBbvjarjjjK7RLCkZdDIFwCIQCSJmDyk84NVpVlMyLAUb055+Pp0nfB
HAXS1HF2DTu2jw==
-----END CERTIFICATE-----
";
