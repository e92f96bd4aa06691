//! Pods whose network namespace nobody tells: they are found by their uid, in the names of their cgroups.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use adit_tests::bed::{Bed, BedBuilder, Pod, PodSpec, wait_for};
use adit_tests::net;

use nix::sched::{CloneFlags, unshare};

use crate::world::{LONG, PORT, SOON, ask, echo, source_line};

const UID: &str = "0b5e7c0a-4a6f-4f0e-9d55-3d3a1b0c9e01";
const OTHER: &str = "7d1f2a34-98bc-4de0-8a11-5e6f708192a3";

/// On n1 `web`, in a cgroup named by the cgroupfs driver, and `db`, in one named by systemd's; on n2 `server`.
fn cluster(name: &str) -> BedBuilder {
    let systemd = format!(
        "kubepods-besteffort.slice/kubepods-besteffort-pod{}.slice",
        OTHER.replace('-', "_")
    );
    let web = PodSpec::new("web").account("shop/web");
    let db = PodSpec::new("db").account("shop/db");
    Bed::builder(name)
        .node("n1")
        .node("n2")
        .pod("n1", web.kubelets(UID, &format!("burstable/pod{UID}")))
        .pod("n1", db.kubelets(OTHER, &systemd))
        .pod("n2", PodSpec::new("server").account("shop/server"))
}

/// Starts the bed with a mesh that waits for what it does not list, and knows no addresses of n1's pods.
fn start_without_addresses(bed: &Bed) {
    bed.update(|mesh| {
        mesh.unlisted_pods = Some("awaited".to_owned());
        for workload in mesh.workloads.iter_mut().filter(|workload| workload.node == "n1") {
            workload.addresses.clear();
        }
    })
    .unwrap();
    bed.start_all().unwrap();
}

fn enrolments(bed: &Bed) -> usize {
    bed.node("n1").log().text().matches("is enrolled as").count()
}

fn connect_once(pod: &Pod, to: SocketAddr) -> Option<i32> {
    pod.run(move || Ok(TcpStream::connect(to).err().and_then(|error| error.raw_os_error())))
        .unwrap()
}

#[test]
fn a_pod_is_found_by_its_uid_and_enrolled_before_the_mesh_knows_its_address() {
    let bed = cluster("by uid").build().unwrap();
    start_without_addresses(&bed);
    let (server, node) = (bed.pod("server"), bed.node("n1"));
    let _server = echo(server, PORT);
    let _alive: Vec<_> = ["web", "db"].map(|name| echo(bed.pod(name), PORT)).into();
    for name in ["web", "db"] {
        node.wait_for_log(&format!("pod shop/{name} is enrolled"), SOON)
            .unwrap();
        let seen = ask(bed.pod(name), server.at(PORT));
        assert_eq!(source_line(&bed, bed.pod(name), &seen).get("path"), "hbone", "{name}");
    }
    assert_eq!(enrolments(&bed), 2);
    // What the mesh learns later is nothing new.
    bed.update(|mesh| {
        for name in ["web", "db"] {
            mesh.workload(name).unwrap().addresses = bed.pod(name).addresses();
        }
    })
    .unwrap();
    for name in ["web", "db"] {
        let pod = bed.pod(name);
        let reached = || Ok(crate::world::is_answered(server, pod.at(PORT)));
        wait_for("the pod to be reached", SOON, reached).unwrap();
        ask(pod, server.at6(PORT));
    }
    assert_eq!(enrolments(&bed), 2, "nothing was enrolled anew");
}

#[test]
fn a_pod_that_is_born_before_the_mesh_lists_it_is_refused_until_then() {
    let bed = cluster("listed later").build().unwrap();
    let (web, db, server) = (bed.pod("web"), bed.pod("db"), bed.pod("server"));
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.node != "n1"))
        .unwrap();
    start_without_addresses(&bed);
    let node = bed.node("n1");
    let (_server, _alive) = (echo(server, PORT), [echo(web, PORT), echo(db, PORT)]);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(600) {
        for pod in [web, db] {
            assert_eq!(connect_once(pod, server.at(PORT)), Some(libc::EPERM), "{}", pod.name());
        }
    }
    let mut entry = web.entry(true);
    entry.addresses.clear();
    let outside = db.entry(false);
    bed.update(|mesh| mesh.workloads.extend([entry, outside])).unwrap();
    node.wait_for_log("pod shop/web is enrolled", SOON).unwrap();
    assert_eq!(source_line(&bed, web, &ask(web, server.at(PORT))).get("path"), "hbone");
    let passes = || Ok(connect_once(db, server.at(PORT)) != Some(libc::EPERM));
    wait_for("the pod outside the mesh to connect", SOON, passes).unwrap();
}

#[test]
fn a_sandbox_that_is_started_anew_under_the_same_uid_is_captured_again() {
    let bed = Bed::builder("restarted")
        .node("n1")
        .node("n2")
        .pod(
            "n1",
            PodSpec::new("web")
                .account("shop/web")
                .kubelets(UID, &format!("besteffort/pod{UID}")),
        )
        .pod("n2", PodSpec::new("server").account("shop/server"))
        .start()
        .unwrap();
    let server = bed.pod("server");
    let _server = echo(server, PORT);
    let to = server.at(PORT);
    for generation in 0..5 {
        let born = bed.rebirth("n1", generation).unwrap();
        let connects = born[0].spawn(move || {
            let begin = Instant::now();
            loop {
                match TcpStream::connect(to) {
                    Ok(stream) => return Ok(stream.local_addr()?),
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied && begin.elapsed() < SOON => {}
                    Err(error) => return Err(error.into()),
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let local = connects.unwrap().join(LONG).unwrap().to_string();
        let carried = |line: &adit_tests::bed::AccessLine| line.has(&[("source.addr", &local), ("path", "hbone")]);
        bed.node("n1").wait_for_access(&local, SOON, carried).unwrap();
    }
}

#[test]
fn each_pod_is_tested_through_its_own_hooks() {
    let bed = cluster("tested")
        .node_argument("--log-level")
        .node_argument("debug")
        .build()
        .unwrap();
    start_without_addresses(&bed);
    let _alive = ["web", "db"].map(|name| echo(bed.pod(name), PORT));
    for name in ["web", "db"] {
        bed.node("n1")
            .wait_for_log(&format!("pod shop/{name} is captured"), SOON)
            .unwrap();
    }
    // To anybody else the test's address is one like any other.
    let attempt = bed.pod("web").run(|| {
        let to: SocketAddr = "198.51.100.1:15".parse()?;
        net::attempt(to)
    });
    assert_eq!(attempt.unwrap().text, "");
}

#[test]
fn a_pod_with_users_of_its_own_is_found_and_captured_like_any_other() {
    let name = |name: &str| PodSpec::new(name).account(&format!("shop/{name}")).own_users();
    let bed = Bed::builder("own users")
        .node("n1")
        .node("n2")
        .pod("n1", name("web").kubelets(UID, &format!("burstable/pod{UID}")))
        .pod("n1", name("db").kubelets(OTHER, &format!("besteffort/pod{OTHER}")))
        .pod("n2", name("server"))
        .build()
        .unwrap();
    start_without_addresses(&bed);
    let (web, db, server) = (bed.pod("web"), bed.pod("db"), bed.pod("server"));
    let _servers: Vec<_> = [web, db, server].map(|pod| echo(pod, PORT)).into();
    for pod in [web, db] {
        bed.node("n1")
            .wait_for_log(&format!("pod shop/{} is enrolled", pod.name()), SOON)
            .unwrap();
    }
    bed.update(|mesh| {
        for pod in [web, db] {
            mesh.workload(pod.name()).unwrap().addresses = pod.addresses();
        }
    })
    .unwrap();
    let direct = || Ok(source_line(&bed, web, &ask(web, db.at(PORT))).get("path") == "direct");
    wait_for("the neighbour to be known", SOON, direct).unwrap();
    for (to, path) in [(server.at(PORT), "hbone"), (db.at6(PORT), "direct")] {
        // As root of the pod, who is nobody outside of it.
        let asked = web.run(move || {
            unshare(CloneFlags::CLONE_NEWUSER)?;
            net::ask(to, "from users of its own")
        });
        let seen = asked.unwrap();
        assert_eq!(seen.text, "from users of its own");
        assert_eq!(source_line(&bed, web, &seen).get("path"), path);
    }
}

#[test]
fn a_pod_that_is_deleted_before_it_was_found_leaves_nothing_and_may_come_again() {
    let bed = cluster("deleted early").build().unwrap();
    start_without_addresses(&bed);
    let (node, web, server) = (bed.node("n1"), bed.pod("web"), bed.pod("server"));
    let _server = echo(server, PORT);
    let waiting = |count: f64| {
        let figure = || Ok(node.metrics()?.sum("adit_pods", &[("capture", "waiting")]) == count);
        wait_for(&format!("{count} pods that wait"), SOON, figure).unwrap();
    };
    waiting(2.0);
    let files = node.open_files().unwrap();
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != "web"))
        .unwrap();
    waiting(1.0);
    assert!(!node.state().unwrap()["capture"].to_string().contains("web"));
    // Whoever comes in its cgroup now is nobody that is known.
    let _alive = echo(web, PORT);
    assert_eq!(connect_once(web, server.at(PORT)), Some(libc::EPERM));
    assert_eq!(enrolments(&bed), 0);
    assert!(node.open_files().unwrap() <= files + 2, "{files} before");
    let mut entry = web.entry(true);
    entry.addresses.clear();
    bed.update(|mesh| mesh.workloads.push(entry)).unwrap();
    node.wait_for_log("pod shop/web is enrolled", SOON).unwrap();
    ask(web, server.at(PORT));
}
