//! Of a pod that has left nothing remains: no descriptor, no pin, no certificate, and no hold on its network namespace.

use std::io::Read;
use std::os::unix::fs::MetadataExt as _;

use adit_tests::bed::{Node, PodSpec, wait_for};
use adit_tests::net::{self, Ending};

use crate::world::{LONG, PORT, SOON, ask, echo, world};

/// Connections through the tunnel, and direct ones.
const OPEN: usize = 10;

fn pinned_pods(node: &Node) -> usize {
    std::fs::read_dir(node.bpf_dir().join("v2/pods")).unwrap().count()
}

/// Whether the proxy has the network namespace open.
fn holds(node: &Node, inode: u64) -> bool {
    let files = std::fs::read_dir(format!("/proc/{}/fd", node.pid().unwrap())).unwrap();
    files
        .flatten()
        .filter_map(|file| std::fs::metadata(file.path()).ok())
        .any(|file| file.ino() == inode)
}

#[test]
fn a_pod_that_leaves_with_connections_open_leaves_nothing_behind() {
    let bed = world("departure")
        .pod("n1", PodSpec::new("late").account("shop/late").unknown())
        .start()
        .unwrap();
    let (client, late, server) = (bed.pod("client"), bed.pod("late"), bed.pod("server"));
    let _servers = [echo(server, PORT), echo(client, PORT)];
    let node = bed.node("n1");
    (0..20).for_each(|_| drop(ask(client, server.at(PORT))));
    let inode = std::fs::metadata(late.netns()).unwrap().ino();
    let (files, pods) = (node.open_files().unwrap(), pinned_pods(node));
    let entry = late.entry(true);
    bed.update(|mesh| mesh.workloads.push(entry)).unwrap();
    node.wait_for_log("pod shop/late is enrolled", SOON).unwrap();
    assert!(holds(node, inode));
    assert_eq!(pinned_pods(node), pods + 1);
    let (far, near) = (server.at(PORT), client.at(PORT));
    let open = late
        .serve(move |stage| {
            let mut open = net::connect_many(far, OPEN, 2)?;
            open.extend(net::connect_many(near, OPEN, 2)?);
            for mut stream in &open {
                stream.read_exact(&mut [0; 2])?;
            }
            stage.reached(())?;
            let endings = open[..OPEN].iter().map(|stream| net::read_to_end(stream).1);
            Ok(endings.filter(|ending| *ending != Ending::Stuck).count())
        })
        .unwrap();
    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != "late"))
        .unwrap();
    node.wait_for_log("pod shop/late has left", SOON).unwrap();
    assert_eq!(open.join(LONG).unwrap(), OPEN, "what the proxy carried has ended");
    wait_for("its namespace to be let go", SOON, || Ok(!holds(node, inode))).unwrap();
    assert_eq!(pinned_pods(node), pods);
    let identity = late.identity();
    let forgotten = || Ok(!node.state()?["certificates"].to_string().contains(&identity));
    wait_for("its certificate to be dropped", SOON, forgotten).unwrap();
    // Its tunnels too, in time.
    let back = || Ok(node.open_files()? <= files + 2);
    let result = wait_for("the proxy's files to be as many as before", SOON, back);
    result.unwrap_or_else(|error| panic!("{error}: {files} before, {:?} now", node.open_files()));
}
