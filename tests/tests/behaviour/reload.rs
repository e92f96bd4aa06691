//! The mesh file is read again when it changes, and a broken one changes nothing.

use std::os::unix::fs::symlink;

use adit_tests::bed::{PodSpec, PortDoc, ServiceDoc, wait_for};
use adit_tests::net;

use crate::world::{PORT, SOON, ask, assert_refused, echo, is_answered, source_line, world};

const DENY_ALL: &str = "
    name: closed
    namespace: shop
    scope: namespace
    action: deny
    rules:
      - from:
          - namespaces: [shop]
";

#[test]
fn a_policy_that_appears_refuses_and_one_that_goes_permits_again() {
    let bed = world("policy comes").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    ask(client, server.at(PORT));

    bed.update(|mesh| mesh.policies.push(DENY_ALL.to_owned())).unwrap();
    wait_for("the policy to be in force", SOON, || {
        Ok(!is_answered(client, server.at(PORT)))
    })
    .unwrap();
    assert_refused(client, server.at(PORT));

    bed.update(|mesh| mesh.policies.clear()).unwrap();
    wait_for("the policy to be gone", SOON, || {
        Ok(is_answered(client, server.at(PORT)))
    })
    .unwrap();
}

#[test]
fn a_broken_file_keeps_the_last_good_state_and_the_log_says_where_it_is_broken() {
    let bed = world("broken").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    bed.replace_mesh_file("trustDomain: cluster.local\nworkloads:\n  - name: [\n")
        .unwrap();
    for node in bed.nodes() {
        let line = node.wait_for_log("mesh.yaml", SOON).unwrap();
        assert!(line.contains("mesh.yaml"), "{line}");
    }
    ask(client, server.at(PORT));
    bed.replace_mesh_file("").unwrap();
    ask(client, server.at6(PORT));

    // What was mended is in force.
    bed.update(|mesh| mesh.policies.push(DENY_ALL.to_owned())).unwrap();
    wait_for("the mended file to be in force", SOON, || {
        Ok(!is_answered(client, server.at(PORT)))
    })
    .unwrap();
}

#[test]
fn a_file_behind_a_symlink_is_read_again_when_the_link_is_swapped() {
    let bed = world("symlink").build().unwrap();
    // As Kubernetes mounts a ConfigMap: the file is a link through a link that is swapped.
    let (first, second) = (bed.dir().join("v1"), bed.dir().join("v2"));
    let text = std::fs::read_to_string(bed.mesh_file()).unwrap();
    for (folder, text) in [
        (&first, text.clone()),
        (&second, text.replace("policies: []", &policies_section())),
    ] {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("mesh.yaml"), text).unwrap();
    }
    let data = bed.dir().join("data");
    symlink(&first, &data).unwrap();
    std::fs::remove_file(bed.mesh_file()).unwrap();
    symlink(data.join("mesh.yaml"), bed.mesh_file()).unwrap();
    bed.start_all().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    ask(client, server.at(PORT));

    let next = bed.dir().join("data-next");
    symlink(&second, &next).unwrap();
    std::fs::rename(&next, &data).unwrap();
    wait_for("the second version to be in force", SOON, || {
        Ok(!is_answered(client, server.at(PORT)))
    })
    .unwrap();
}

fn policies_section() -> String {
    let mut mesh = adit_tests::bed::MeshDoc {
        trust_domain: "x".to_owned(),
        ..Default::default()
    };
    mesh.policies.push(DENY_ALL.to_owned());
    let text = mesh.to_yaml().unwrap();
    text[text.find("policies:").unwrap()..].trim_end().to_owned()
}

#[test]
fn a_pod_that_appears_is_enrolled_and_one_that_goes_is_let_go() {
    let bed = world("pod comes")
        .pod("n1", PodSpec::new("late").account("shop/late").unknown())
        .start()
        .unwrap();
    let (late, server) = (bed.pod("late"), bed.pod("server"));
    let _server = echo(server, PORT);
    ask(late, server.at(PORT));

    let entry = late.entry(true);
    bed.update(|mesh| mesh.workloads.push(entry)).unwrap();
    let identity = late.identity();
    let has = |wanted: bool| Ok(bed.node("n1").state()?["certificates"].to_string().contains(&identity) == wanted);
    wait_for("the new pod's certificate", SOON, || has(true)).unwrap();
    bed.node("n1").wait_ready(SOON).unwrap();
    let captured = || {
        let seen = late.run(|| net::ask(server.at(PORT), "am I in?"))?;
        let address = seen.local.to_string();
        let lines = bed.node("n1").access_log();
        Ok(lines
            .iter()
            .any(|line| line.has(&[("source.addr", &address), ("path", "hbone")])))
    };
    wait_for("the new pod to be captured", SOON, captured).unwrap();

    bed.update(|mesh| mesh.workloads.retain(|workload| workload.name != "late"))
        .unwrap();
    wait_for("the certificate to be dropped", SOON, || has(false)).unwrap();
    let plain = || Ok(is_answered(late, server.at(PORT)));
    wait_for("the pod to talk plainly again", SOON, plain).unwrap();
    let listeners = late.output("ss", &["-Hltn"]).unwrap();
    assert!(
        listeners.trim().is_empty(),
        "Adit still listens in a pod that is not enrolled: {listeners}"
    );
}

#[test]
fn a_service_that_appears_is_resolved() {
    let bed = world("service comes").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let address: std::net::SocketAddr = "10.96.0.77:80".parse().unwrap();
    bed.update(|mesh| {
        mesh.services.push(ServiceDoc {
            name: "web".to_owned(),
            namespace: "shop".to_owned(),
            addresses: vec![address.ip()],
            ports: vec![PortDoc {
                port: 80,
                target: PORT.to_string(),
            }],
            selector: None,
            endpoints: Some(vec!["server".to_owned()]),
            distribution: None,
        });
    })
    .unwrap();
    let known = || {
        Ok(bed.node("n1").state()?["services"]
            .to_string()
            .contains(&address.ip().to_string()))
    };
    wait_for("the service", SOON, known).unwrap();
    let seen = ask(client, address);
    assert_eq!(source_line(&bed, client, &seen).get("service"), "shop/web");
}
