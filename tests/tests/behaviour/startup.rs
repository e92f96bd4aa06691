//! A pod is captured from its first instruction on, and one that is not in the mesh is soon known not to be.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use adit_tests::bed::{Bed, PodSpec, wait_for};
use adit_tests::net;
use nix::sched::{CloneFlags, unshare};

use crate::world::{LONG, PORT, SOON, ask, echo, world};

/// Births in all, and how many pods are born at a time.
const BIRTHS: usize = 1000;
const AT_A_TIME: usize = 20;
const MARKER: &str = "marker-of-a-newborn-71c4";

/// Connects as the first instruction, again and again while that is refused. Gives the connection, how often it was
/// refused, and how long all that took.
fn connect_at_once(to: SocketAddr) -> io::Result<(TcpStream, u32, Duration)> {
    let (begin, mut refused) = (Instant::now(), 0);
    loop {
        match TcpStream::connect(to) {
            Ok(stream) => return Ok((stream, refused, begin.elapsed())),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) && begin.elapsed() < SOON => refused += 1,
            Err(error) => return Err(error),
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn refusals(bed: &Bed) -> f64 {
    bed.node("n1").metrics().unwrap().sum("adit_startup_refused_total", &[])
}

/// Beds on whose first node so many pods are to be born again and again, with a server on the other.
fn nursery(name: &str, pods: usize) -> Bed {
    let newborns = (0..pods).fold(Bed::builder(name).node("n1").node("n2"), |bed, number| {
        bed.pod("n1", PodSpec::new(&format!("p{number}")).account("shop/newborn"))
    });
    let server = PodSpec::new("server").account("shop/server");
    newborns.pod("n2", server).start().unwrap()
}

/// Lets the pods be born `generations` times. The first instruction of each is to connect to the server, and then it
/// sends the marker and gets it back. Gives, in order, how long each had to try.
fn bear(bed: &Bed, generations: usize) -> Vec<Duration> {
    let to = bed.pod("server").at(PORT);
    let mut waits = Vec::new();
    for generation in 0..generations {
        let born = bed.rebirth("n1", generation).unwrap();
        let first = || {
            let (mut stream, _, took) = connect_at_once(to)?;
            net::with_deadlines(&stream)?;
            stream.write_all(MARKER.as_bytes())?;
            let mut answer = [0; MARKER.len()];
            stream.read_exact(&mut answer)?;
            anyhow::ensure!(answer == *MARKER.as_bytes(), "another answer");
            Ok(took.as_micros() as u64)
        };
        let running: Vec<_> = born.iter().map(|pod| pod.spawn(first).unwrap()).collect();
        waits.extend(
            running
                .into_iter()
                .map(|running| Duration::from_micros(running.join(LONG).unwrap())),
        );
    }
    waits.sort_unstable();
    let at = |part: usize| waits[(waits.len() - 1) * part / 100];
    println!(
        "from a pod's first instruction to its capture, {} at a time: median {:?}, 90 of 100 {:?}, longest {:?}",
        waits.len() / generations,
        at(50),
        at(90),
        at(100)
    );
    waits
}

#[test]
fn a_pod_whose_first_instruction_is_connect_is_captured_a_thousand_times_out_of_a_thousand() {
    let bed = nursery("newborn", AT_A_TIME);
    let _server = echo(bed.pod("server"), PORT);
    let capture = bed.capture_link().unwrap();
    let waits = bear(&bed, BIRTHS / AT_A_TIME);
    assert_eq!(
        capture.count(MARKER),
        0,
        "a newborn's bytes were seen between the nodes"
    );
    assert!(capture.is_complete() && capture.packets() > BIRTHS as u64);
    assert_eq!(waits.len(), BIRTHS);
}

#[test]
fn a_pod_is_enrolled_within_moments_of_its_first_process() {
    let bed = nursery("moments", 1);
    let _server = echo(bed.pod("server"), PORT);
    let waits = bear(&bed, 30);
    // A container runtime takes longer from a pod's first process to the first instruction of a container.
    assert!(waits[waits.len() / 2] < Duration::from_millis(200), "{waits:?}");
}

#[test]
fn a_pod_outside_the_mesh_connects_soon_after_its_birth_and_is_not_refused_later() {
    let bed = world("outsiders")
        .pod("n1", PodSpec::new("listed").outside().unborn())
        .pod("n1", PodSpec::new("unlisted").unknown().unborn())
        .start()
        .unwrap();
    let outsider = bed.pod("outsider");
    let _server = echo(outsider, PORT);
    let to = outsider.at(PORT);
    for name in ["listed", "unlisted"] {
        let pod = bed.pod(name);
        let (refused, micros) = pod
            .run(|| Ok(connect_at_once(to).map(|(_, refused, took)| (refused, took.as_micros() as u64))?))
            .unwrap();
        println!("{name} was refused {refused} times within {micros} us of its birth");
        assert!(micros < 1_000_000, "{name} had to wait {micros} us");
        let before = refusals(&bed);
        for _ in 0..20 {
            ask(pod, to);
        }
        assert_eq!(refusals(&bed), before, "{name}");
    }
}

#[test]
fn a_pod_outside_the_mesh_that_was_there_before_is_never_refused() {
    let bed = world("before")
        .pod("n1", PodSpec::new("stranger").unknown())
        .start()
        .unwrap();
    let (stranger, outsider) = (bed.pod("stranger"), bed.pod("outsider"));
    let _server = echo(outsider, PORT);
    ask(stranger, outsider.at(PORT));
    ask(stranger, outsider.at6(PORT));
    assert_eq!(refusals(&bed), 0.0);
}

#[test]
fn a_pod_that_leaves_the_mesh_connects_as_one_outside_it() {
    let bed = world("leaves").start().unwrap();
    let (client, outsider, node) = (bed.pod("client"), bed.pod("outsider"), bed.node("n1"));
    let _server = echo(outsider, PORT);
    ask(client, outsider.at(PORT));
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != client.name()))
        .unwrap();
    node.wait_for_log("pod shop/client has left", SOON).unwrap();
    ask(client, outsider.at(PORT));
    assert_eq!(refusals(&bed), 0.0);
}

#[test]
fn pods_of_the_hosts_network_and_processes_of_the_host_are_left_alone() {
    let bed = world("host network").start().unwrap();
    let (node, outsider) = (bed.node("n1"), bed.pod("outsider"));
    let _server = echo(outsider, PORT);
    let to = outsider.at(PORT);
    let pod = node.spawn_host_network_pod("daemon", || net::ask(to, "from a host-network pod"));
    assert_eq!(pod.unwrap().join(LONG).unwrap().text, "from a host-network pod");
    let seen = node.as_host_process(c"sh", || net::ask(to, "from the host"));
    assert_eq!(seen.unwrap().text, "from the host");
    assert_eq!(refusals(&bed), 0.0);
}

/// Connects, from a network namespace of the process's own, to an address that nothing there leads to. Gives the errno.
fn connect_from_a_new_namespace(to: SocketAddr) -> anyhow::Result<Option<i32>> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    Ok(TcpStream::connect(to).err().and_then(|error| error.raw_os_error()))
}

#[test]
fn a_namespace_within_a_pod_of_the_mesh_gets_no_way_out() {
    let bed = world("within").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _alive = echo(client, PORT);
    let to = server.at(PORT);
    let from_within = client
        .spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            let begin = Instant::now();
            let mut tries = 0;
            while begin.elapsed() < Duration::from_millis(500) {
                tries += 1;
                let error = TcpStream::connect(to).err().and_then(|error| error.raw_os_error());
                anyhow::ensure!(error == Some(libc::EPERM), "try {tries}: {error:?}");
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(tries)
        })
        .unwrap();
    assert!(from_within.join(LONG).unwrap() > 10);
    bed.node("n1")
        .wait_for_log("is a network namespace within a pod", SOON)
        .unwrap();
    let _server = echo(server, PORT);
    ask(client, to);
}

#[test]
fn what_start_up_permits_passes_and_is_counted() {
    let bed = world("permissive")
        .node_argument("--startup")
        .node_argument("permissive")
        .start()
        .unwrap();
    let (client, server, node) = (bed.pod("client"), bed.pod("server"), bed.node("n1"));
    let _alive = echo(client, PORT);
    let to = server.at(PORT);
    let error = client.run(|| connect_from_a_new_namespace(to)).unwrap();
    assert_eq!(
        error,
        Some(libc::ENETUNREACH),
        "nothing but the network itself refuses it"
    );
    let passed = || Ok(node.metrics()?.sum("adit_startup_passed_total", &[]) >= 1.0);
    wait_for("the count", SOON, passed).unwrap();
    assert_eq!(refusals(&bed), 0.0);
}

#[test]
fn a_refusal_at_start_up_is_counted_and_logged() {
    let bed = world("refused").start().unwrap();
    let (client, server, node) = (bed.pod("client"), bed.pod("server"), bed.node("n1"));
    let _alive = echo(client, PORT);
    let to = server.at(PORT);
    let error = client.run(|| connect_from_a_new_namespace(to)).unwrap();
    assert_eq!(error, Some(libc::EPERM));
    assert!(refusals(&bed) >= 1.0);
    node.wait_for_log("nobody had looked at its network namespace yet", SOON)
        .unwrap();
}

#[test]
fn pods_that_are_born_while_no_proxy_runs_are_let_out_by_the_next_one_whatever_they_are() {
    let bed = world("born meanwhile")
        .pod("n1", PodSpec::new("meshed").account("shop/meshed").unknown().unborn())
        .pod("n1", PodSpec::new("listed").outside().unborn())
        .pod("n1", PodSpec::new("unlisted").unknown().unborn())
        .start()
        .unwrap();
    let (node, server, outsider) = (bed.node("n1"), bed.pod("server"), bed.pod("outsider"));
    let _servers = [echo(server, PORT), echo(outsider, PORT)];
    node.kill();
    let entry = bed.pod("meshed").entry(true);
    bed.update(|mesh| mesh.workloads.push(entry)).unwrap();
    let far = [("meshed", server), ("listed", outsider), ("unlisted", outsider)];
    let running = far.map(|(name, to)| {
        let to = to.at(PORT);
        let mut born = bed
            .pod(name)
            .spawn_staged(move |stage| {
                let error = TcpStream::connect(to).err().and_then(|error| error.raw_os_error());
                stage.reached(error)?;
                Ok(connect_at_once(to)?.2.as_micros() as u64)
            })
            .unwrap();
        let error: Option<i32> = born.stage(SOON).unwrap();
        assert_eq!(error, Some(libc::EPERM), "{name} is born and nobody has looked");
        (name, born)
    });
    node.start().unwrap();
    for (name, born) in running {
        println!("{name} got out {} us after its birth", born.join(LONG).unwrap());
    }
    ask(bed.pod("meshed"), server.at(PORT));
    ask(bed.pod("client"), server.at(PORT));
}
