//! The bed itself, without Adit in it.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use adit_tests::bed::{Bed, Pod, PodSpec, Stage, errno, residue, wait_for};

const MARKER: &str = "marker-in-plaintext-5d1f";

fn two_nodes(name: &str) -> Bed {
    Bed::builder(name)
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("a"))
        .pod("n1", PodSpec::new("b").extra_addresses(1))
        .pod("n2", PodSpec::new("c"))
        .pod("n2", PodSpec::new("d").ipv4_only())
        .build()
        .unwrap()
}

fn greet_once(stage: &Stage, port: u16) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(("::", port))?;
    stage.reached(listener.local_addr()?)?;
    let (mut stream, peer) = listener.accept()?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    stream.write_all(text.as_bytes())?;
    Ok(peer)
}

/// Sends the marker from one pod to another and gives the source address that the server saw.
fn greet(from: &Pod, to: &Pod, address: IpAddr) -> IpAddr {
    let server = to.serve(|stage| greet_once(stage, 8080)).unwrap();
    let answer = from.run(|| {
        let mut stream = TcpStream::connect((address, 8080))?;
        stream.write_all(MARKER.as_bytes())?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    });
    assert_eq!(answer.unwrap(), MARKER);
    server.join(Duration::from_secs(5)).unwrap().ip().to_canonical()
}

#[test]
fn pods_reach_each_other_within_and_across_nodes_in_both_families() {
    let bed = two_nodes("reach");
    let a = bed.pod("a");
    for to in [bed.pod("b"), bed.pod("c")] {
        for address in to.addresses() {
            let seen = greet(a, to, address);
            let own: IpAddr = if address.is_ipv4() {
                a.v4().into()
            } else {
                a.v6().into()
            };
            assert_eq!(seen, own, "as the source of a connection to {address}");
        }
    }
}

#[test]
fn a_capture_of_the_link_sees_plaintext_across_nodes_and_nothing_of_what_stays_on_one() {
    let bed = two_nodes("capture");
    let capture = bed.capture_link().unwrap();
    greet(bed.pod("a"), bed.pod("b"), bed.pod("b").v4().into());
    assert!(
        !capture.contains(MARKER),
        "traffic within a node was seen between nodes"
    );
    greet(bed.pod("a"), bed.pod("c"), bed.pod("c").v6().into());
    assert_eq!(capture.count(MARKER), 2, "once there and once back");
    assert!(capture.packets() > 5 && capture.bytes() > 500);
    assert!(capture.is_complete());
}

#[test]
fn three_nodes_are_joined_by_a_switch() {
    let bed = Bed::builder("three")
        .node("n1")
        .node("n2")
        .node("n3")
        .pod("n1", PodSpec::new("a"))
        .pod("n2", PodSpec::new("b"))
        .pod("n3", PodSpec::new("c"))
        .build()
        .unwrap();
    greet(bed.pod("a"), bed.pod("c"), bed.pod("c").v4().into());
    greet(bed.pod("b"), bed.pod("c"), bed.pod("c").v6().into());
}

#[test]
fn a_bed_is_built_in_a_moment() {
    // The first one also removes what earlier runs have left.
    drop(two_nodes("warm"));
    let begin = Instant::now();
    let bed = two_nodes("quick");
    let took = begin.elapsed();
    drop(bed);
    assert!(took < Duration::from_secs(2), "it took {took:?}");
    eprintln!("a bed of two nodes and four pods took {took:?}");
}

#[test]
fn code_in_a_pod_gives_its_result_its_error_with_errno_and_its_panic() {
    let bed = two_nodes("results");
    let pod = bed.pod("a");
    assert_eq!(pod.run(|| Ok(vec![1, 2, 3])).unwrap(), [1, 2, 3]);

    let nobody = bed.pod("c").at(9);
    let error = pod.run(|| Ok(TcpStream::connect(nobody).map(drop)?)).unwrap_err();
    assert_eq!(errno(&error), Some(libc::ECONNREFUSED), "{error:#}");
    assert!(error.to_string().contains("pod a"), "{error:#}");

    let error = pod.run(|| -> anyhow::Result<()> { panic!("on purpose") }).unwrap_err();
    assert!(
        error.to_string().contains("on purpose") && error.to_string().contains("bed.rs"),
        "{error:#}"
    );

    let stuck = pod.spawn_staged(Stage::hold).unwrap();
    let error = stuck.join(Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("did not answer"), "{error:#}");

    let killed = pod.spawn_staged(Stage::hold).unwrap();
    killed.signal(nix::sys::signal::Signal::SIGTERM).unwrap();
    let error = killed.join(Duration::from_secs(5)).unwrap_err();
    assert!(error.to_string().contains("killed by SIGTERM"), "{error:#}");
}

#[test]
fn code_in_a_pod_keeps_step_with_the_test() {
    let bed = two_nodes("stages");
    let mut running = bed
        .pod("a")
        .spawn_staged(|stage| {
            stage.reached("first")?;
            stage.hold()?;
            stage.reached(2)?;
            Ok("end".to_owned())
        })
        .unwrap();
    let second = Duration::from_secs(5);
    assert_eq!(running.stage::<String>(second).unwrap(), "first");
    assert!(
        running.stage::<u32>(Duration::from_millis(30)).is_err(),
        "it did not wait for the test"
    );
    running.proceed().unwrap();
    assert_eq!(running.stage::<u32>(second).unwrap(), 2);
    assert_eq!(running.join(second).unwrap(), "end");
}

#[test]
fn code_and_commands_run_in_the_cgroup_and_namespace_of_their_pod() {
    let bed = two_nodes("place");
    let pod = bed.pod("a");
    let wanted = pod
        .cgroup()
        .strip_prefix(adit_tests::bed::cgroup_mount_point().unwrap())
        .unwrap()
        .to_owned();
    let wanted = format!("0::/{}", wanted.display());
    let own = pod.run(|| Ok(std::fs::read_to_string("/proc/self/cgroup")?)).unwrap();
    assert!(own.lines().any(|line| line == wanted), "{own}");
    let command = pod.output("cat", &["/proc/self/cgroup"]).unwrap();
    assert!(command.lines().any(|line| line == wanted), "{command}");
    let addresses = pod.output("ip", &["-o", "address", "show", "dev", "eth0"]).unwrap();
    assert!(addresses.contains(&pod.v4().to_string()), "{addresses}");
    assert!(addresses.contains(&pod.v6().to_string()), "{addresses}");
}

#[test]
fn a_command_in_a_pod_is_killed_with_what_it_started() {
    let bed = two_nodes("spawned");
    let pod = bed.pod("c");
    let command = pod
        .spawn_command("sh", &["-c", "echo started; sleep 600 & wait"])
        .unwrap();
    command.log().wait_for("started", Duration::from_secs(5)).unwrap();
    let processes = || {
        std::fs::read_to_string(pod.cgroup().join("cgroup.procs"))
            .unwrap()
            .lines()
            .count()
    };
    wait_for("the shell and its child", Duration::from_secs(5), || {
        Ok(processes() == 2)
    })
    .unwrap();
    drop(command);
    wait_for("the end of both", Duration::from_secs(5), || Ok(processes() == 0)).unwrap();
}

#[test]
fn nothing_is_left_of_a_bed() {
    let bed = two_nodes("residue");
    let prefix = bed.prefix().to_owned();
    let stray = bed.pod("a").spawn_command("sleep", &["600"]).unwrap();
    let found = residue(&format!("{prefix}-")).len() + residue(&prefix).len();
    assert!(found > 0, "the residue check finds a living bed");
    let folder = bed.dir().to_owned();
    drop(bed);
    assert_eq!(residue(&format!("{prefix}-")), Vec::<String>::new());
    assert!(!adit_tests::bed::cgroup_mount_point().unwrap().join(&prefix).exists());
    assert!(!folder.exists());
    drop(stray);
}

#[test]
fn the_leftovers_of_a_killed_run_are_swept_up_and_those_of_a_live_one_are_not() {
    let bed = two_nodes("sweep");
    // Ids up to 4194304 exist; this one is nobody's.
    let dead = format!("adit-{}-0", u32::MAX);
    let cgroup = adit_tests::bed::cgroup_mount_point().unwrap().join(&dead);
    std::fs::create_dir_all(cgroup.join("n1/pods")).unwrap();
    assert!(
        std::process::Command::new("ip")
            .args(["netns", "add", &dead])
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(residue(&dead).len(), 2);
    adit_tests::bed::sweep();
    assert_eq!(residue(&dead), Vec::<String>::new());
    greet(bed.pod("a"), bed.pod("c"), bed.pod("c").v4().into());
}
