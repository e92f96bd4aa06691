//! Sockets and processes that cross from one namespace to another.

use std::fs::File;
use std::os::unix::net::UnixStream;

use adit_tests::bed::AccessLine;
use adit_tests::net::{self, Ending, Seen};
use nix::sched::{CloneFlags, setns};
use socket2::{Domain, Socket, Type};

use super::{MARKER, STRICT, assert_never_in_plaintext, line_in_own_name, lines_about};
use crate::world::{LONG, PORT, SOON, echo, world};

fn new_socket() -> std::io::Result<Socket> {
    Socket::new(Domain::IPV4, Type::STREAM, None)
}

/// Takes a socket that another has made, connects it and sends the marker.
fn ask_with_given(over: &UnixStream, server: std::net::SocketAddr) -> anyhow::Result<Seen> {
    let socket = Socket::from(net::take_socket(over)?);
    net::connect_patiently(&socket, server)?;
    net::ask_on(socket.into(), MARKER)
}

#[test]
fn a_socket_passed_from_another_pod_speaks_for_the_pod_that_made_it() {
    let bed = world("passed").start().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    for (maker, user) in [(neighbour, client), (client, neighbour)] {
        let (give, take) = UnixStream::pair().unwrap();
        let using = user.spawn(|| ask_with_given(&take, server.at(PORT))).unwrap();
        let (process, seen) = {
            maker.run(|| Ok(net::pass_socket(&give, &new_socket()?)?)).unwrap();
            (using.pid(), using.join(LONG).unwrap())
        };
        assert_eq!(seen.text, MARKER);
        let line = line_in_own_name(&bed, maker, &seen);
        // The author is who called.
        assert_eq!(line.number("pid"), u64::from(process), "{line:?}");
    }
    assert_never_in_plaintext(&capture);
}

#[test]
fn a_socket_passed_from_the_host_has_no_identity() {
    let bed = world("from the host").policy(STRICT).start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let (give, take) = UnixStream::pair().unwrap();
    let using = client.spawn(|| ask_with_given(&take, server.at(PORT))).unwrap();
    let socket = bed.node("n1").inside(new_socket).unwrap().unwrap();
    net::pass_socket(&give, &socket).unwrap();
    assert_plain_refusal(using.join(LONG));
    let wanted = |line: &AccessLine| line.has(&[("source.identity", ""), ("how", "policy")]);
    bed.node("n2")
        .wait_for_access("of the host's socket", SOON, wanted)
        .unwrap();
    assert!(lines_about(&bed, server).iter().all(wanted));
}

fn assert_plain_refusal(outcome: anyhow::Result<Seen>) {
    if let Ok(seen) = outcome {
        assert_eq!((seen.text.as_str(), seen.ending), ("", Ending::RESET));
    }
}

#[test]
fn a_process_of_the_host_in_a_pods_network_namespace_has_no_identity() {
    let bed = world("host process").policy(STRICT).start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let netns = File::open(client.netns()).unwrap();
    // A thread of the test: in no pod's cgroup.
    let outcome = std::thread::scope(|scope| {
        let visitor = scope.spawn(|| {
            setns(&netns, CloneFlags::CLONE_NEWNET)?;
            net::ask(server.at(PORT), "a visitor")
        });
        visitor.join().unwrap()
    });
    assert_plain_refusal(outcome);
    let wanted = |line: &AccessLine| line.has(&[("source.identity", ""), ("how", "policy")]);
    bed.node("n2").wait_for_access("of the visitor", SOON, wanted).unwrap();
    assert!(lines_about(&bed, server).iter().all(wanted));
}

#[test]
fn a_process_of_one_pod_in_the_network_namespace_of_another_is_the_other() {
    let bed = world("moved").start().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    let netns = File::open(neighbour.netns()).unwrap();
    // This takes CAP_SYS_ADMIN over the other's namespace, and a name for it.
    let seen = client
        .run(|| {
            setns(&netns, CloneFlags::CLONE_NEWNET)?;
            net::ask(server.at(PORT), MARKER)
        })
        .unwrap();
    line_in_own_name(&bed, neighbour, &seen);
    assert_never_in_plaintext(&capture);
}

/// A namespace within `client` that the pod answers for with an address of its own range.
const INNER: &str = "
    ip link add inner type veth peer name outer
    unshare -n sleep 15 & inside=$!
    while [ /proc/$inside/ns/net -ef /proc/self/ns/net ]; do sleep 0.01; done
    ip link set outer netns $inside
    echo 1 > /proc/sys/net/ipv4/ip_forward
    echo 1 > /proc/sys/net/ipv4/conf/eth0/proxy_arp
    echo 1 > /proc/sys/net/ipv4/conf/inner/proxy_arp
    ip link set inner up
    ip route add ADDRESS/32 dev inner
    nsenter -t $inside -n sh -ec '
        ip link set lo up
        ip address add ADDRESS/24 dev outer
        ip link set outer up
        ip route add default via GATEWAY'
    echo $inside
";

#[test]
fn a_namespace_within_the_pod_gets_no_way_out() {
    let bed = world("inner").policy(STRICT).start().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(neighbour, PORT)];
    let [a, b, c, _] = client.v4().octets();
    let script = INNER
        .replace("ADDRESS", &format!("{a}.{b}.{c}.77"))
        .replace("GATEWAY", &format!("{a}.{b}.{c}.1"));
    let mut pod = client.spawn_command("sh", &["-ec", &(script + "\nwait")]).unwrap();
    let mut inside = String::new();
    adit_tests::bed::wait_for("the inner namespace", SOON, || {
        if let Ok(true) = pod.wait(std::time::Duration::ZERO) {
            anyhow::bail!("the script has ended: {}", pod.log().text());
        }
        inside = pod.log().text().trim().to_owned();
        Ok(inside.parse::<u32>().is_ok())
    })
    .unwrap();
    let netns = File::open(format!("/proc/{inside}/ns/net")).unwrap();
    for destination in [server, neighbour] {
        let outcome = client.run(|| {
            setns(&netns, CloneFlags::CLONE_NEWNET)?;
            net::ask(destination.at(PORT), "from within")
        });
        let error = outcome.unwrap_err();
        assert_eq!(adit_tests::bed::errno(&error), Some(libc::EPERM), "{error:#}");
    }
}
