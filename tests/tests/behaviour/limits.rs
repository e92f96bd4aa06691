//! What has a limit: what happens at it, and afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use adit_tests::bed::{Node, PodSpec, wait_for};
use adit_tests::net;
use nix::errno::Errno;

use crate::world::{LONG, PORT, SOON, ask, echo, is_answered, world};

/// Sets the proxy's own limit of open files.
fn limit_files(node: &Node, limit: usize) {
    let pid = node.pid().unwrap().to_string();
    let status = Command::new("prlimit")
        .args(["--pid", &pid, &format!("--nofile={limit}:")])
        .status()
        .unwrap();
    assert!(status.success());
}

/// The limit that leaves the proxy so many numbers for further files.
fn limit_with_spare(node: &Node, spare: usize) -> usize {
    let files = fs::read_dir(format!("/proc/{}/fd", node.pid().unwrap())).unwrap();
    let open: BTreeSet<usize> = files
        .flatten()
        .filter_map(|file| file.file_name().to_str()?.parse().ok())
        .collect();
    let last = (0..).filter(|number| !open.contains(number)).nth(spare - 1);
    last.unwrap() + 1
}

#[test]
fn without_descriptors_the_proxy_pauses_and_goes_on_once_there_are_some() {
    const COUNT: usize = 60;
    const SPARE: usize = 10;
    let bed = world("descriptors").start().unwrap();
    let (client, neighbour, server) = (bed.pod("client"), bed.pod("neighbour"), bed.pod("server"));
    let _servers = [echo(neighbour, PORT), echo(server, PORT)];
    let (node, to) = (bed.node("n1"), server.at(PORT));
    // So that each worker has its tunnel.
    (0..20).for_each(|_| drop(ask(client, to)));
    limit_files(node, limit_with_spare(node, SPARE));
    let mut open = client
        .spawn_staged(move |stage| {
            let open = net::connect_many(to, COUNT, 1)?;
            stage.reached(())?;
            stage.hold()?;
            let mut answered = 0;
            for stream in open {
                answered += usize::from(net::ask_on(stream, "hello")?.text.ends_with("hello"));
            }
            Ok(answered)
        })
        .unwrap();
    open.stage::<()>(SOON).unwrap();
    node.wait_for_log("pausing for", SOON).unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let pauses = node.log().text().matches("pausing for").count();
    assert!(pauses < 40, "{pauses} lines of log");
    // What does not pass the proxy does not need it.
    ask(client, neighbour.at(PORT));

    limit_files(node, 4096);
    open.proceed().unwrap();
    assert_eq!(open.join(LONG).unwrap(), COUNT);
    ask(client, to);
}

/// The machine's limit of open files, lowered for a while.
struct MachineLimit(String);

impl MachineLimit {
    const FILE: &str = "/proc/sys/fs/file-max";

    fn below_what_is_open() -> Self {
        let before = fs::read_to_string(Self::FILE).unwrap();
        let open = fs::read_to_string("/proc/sys/fs/file-nr").unwrap();
        let open: u64 = open.split_whitespace().next().unwrap().parse().unwrap();
        // Of Unix sockets there may be twice as many, whoever makes them.
        fs::write(Self::FILE, (open / 2).to_string()).unwrap();
        Self(before)
    }
}

impl Drop for MachineLimit {
    fn drop(&mut self) {
        fs::write(Self::FILE, self.0.trim()).unwrap();
    }
}

#[test]
#[ignore = "takes all files of the machine, so only a virtual machine runs it"]
fn a_machine_that_has_no_files_left_does_not_stop_the_proxy() {
    let bed = world("no_files").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let limit = MachineLimit::below_what_is_open();
    // It is in force, but not for whoever may administer the machine: `alloc_empty_file` of the kernel.
    let others = Command::new("/bin/sh").args(["-c", "true"]).uid(65534).status();
    let asked: Vec<_> = (0..10).map(|_| ask(client, server.at(PORT))).collect();
    drop(limit);
    assert_eq!(others.unwrap_err().raw_os_error(), Some(Errno::ENFILE as i32));
    assert_eq!(asked.len(), 10);
    assert!(!bed.node("n1").log().text().contains("pausing for"));
}

#[test]
fn a_pod_has_so_many_connections_carried_and_others_do_not_notice() {
    const MOST: usize = 20;
    let bed = world("places")
        .pod("n1", PodSpec::new("friend").account("shop/friend"))
        .node_argument(&format!("--max-connections-per-pod={MOST}"))
        .start()
        .unwrap();
    let (client, friend, server) = (bed.pod("client"), bed.pod("friend"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(friend, PORT), echo(bed.pod("outsider"), PORT)];
    let (node, to) = (bed.node("n1"), server.at(PORT));
    let mut open = client
        .spawn_staged(move |stage| {
            // All but those on their way into the server, which has as many places and a tunnel in one of them.
            let open = net::connect_many(to, MOST - 4, 1)?;
            stage.reached(())?;
            stage.hold()?;
            drop(open);
            Ok(())
        })
        .unwrap();
    open.stage::<()>(LONG).unwrap();
    let mut more = client
        .spawn_staged(move |stage| {
            let open: Vec<_> = (0..MOST).map(|_| std::net::TcpStream::connect(to)).collect();
            stage.reached(open.len())?;
            stage.hold()?;
            Ok(())
        })
        .unwrap();
    more.stage::<usize>(LONG).unwrap();
    let refused = |line: &adit_tests::bed::AccessLine| line.get("detail").contains("as many as it may have");
    node.wait_for_access("of a refusal", SOON, refused).unwrap();
    node.wait_for_log("--max-connections-per-pod", SOON).unwrap();
    let metrics = node.metrics().unwrap();
    assert!(metrics.sum("adit_connections_over_limit_total", &[]) >= 1.0);
    // Nobody else's are.
    ask(friend, bed.pod("outsider").at(PORT));
    for running in [open, more] {
        running.proceed().unwrap();
        running.join(LONG).unwrap();
    }
    wait_for("the places to be free again", SOON, || Ok(is_answered(client, to))).unwrap();
}
