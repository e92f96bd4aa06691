//! A running pod comes into the mesh and leaves it without a break of what is open.

use adit_tests::bed::{Bed, Node, Running};

use crate::world::{BY_ADDRESS, LONG, PORT, SOON, ask, echo, source_line, talks, world};

fn label(bed: &Bed, name: &str, enrolled: bool) {
    let entry = bed.pod(name).entry(enrolled);
    bed.update(|mesh| {
        let workload = mesh.workload(name).unwrap();
        (workload.protocol, workload.netns) = (entry.protocol, entry.netns);
    })
    .unwrap();
}

#[test]
fn what_is_open_goes_on_when_its_pod_leaves_the_mesh_and_comes_back() {
    // The proxy carries what is within the node too.
    let bed = world("label").policy(BY_ADDRESS).start().unwrap();
    let (client, server, neighbour) = (bed.pod("client"), bed.pod("server"), bed.pod("neighbour"));
    let _servers = [echo(server, PORT), echo(neighbour, PORT), echo(client, PORT)];
    let (node, far) = (bed.node("n1"), bed.node("n2"));
    let mut open = [
        ("out of the pod to another node", talks(client, server.at(PORT), 5)),
        ("out of the pod within the node", talks(client, neighbour.at(PORT), 5)),
        ("into the pod from another node", talks(server, client.at(PORT), 5)),
    ];
    let go_on = |open: &mut [(&str, Running<()>)]| {
        for (which, running) in open {
            running.proceed().unwrap();
            let _: serde_json::Value = running.stage(SOON).unwrap_or_else(|error| panic!("{which}: {error:#}"));
        }
    };
    label(&bed, "client", false);
    node.wait_for_log("pod shop/client has left", SOON).unwrap();
    go_on(&mut open);
    label(&bed, "server", false);
    far.wait_for_log("pod shop/server has left", SOON).unwrap();
    go_on(&mut open);
    label(&bed, "server", true);
    label(&bed, "client", true);
    let is_again = |node: &Node, name: &str| {
        node.log()
            .text()
            .matches(&format!("pod shop/{name} is enrolled"))
            .count()
            == 2
    };
    let again = || Ok(is_again(node, "client") && is_again(far, "server"));
    adit_tests::bed::wait_for("the pods to be enrolled again", SOON, again).unwrap();
    go_on(&mut open);
    let captured = || {
        let seen = ask(client, server.at(PORT));
        Ok(source_line(&bed, client, &seen).get("path") == "hbone")
    };
    adit_tests::bed::wait_for("new connections to be carried again", LONG, captured).unwrap();
    go_on(&mut open);
    for (which, running) in open {
        running.proceed().unwrap();
        running.join(LONG).unwrap_or_else(|error| panic!("{which}: {error:#}"));
    }
}
