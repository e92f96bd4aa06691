//! `adit check` says what a node has, what it lacks, and who else is there.

use std::fs::File;

use adit_tests::bed::{Bed, CheckReport, PodSpec, wait_for};
use adit_tests::net;

use crate::world::{LONG, SOON, world};

/// The report of the first node, with more arguments.
fn check(bed: &Bed, more: &[&str]) -> CheckReport {
    bed.node("n1").check(more).unwrap()
}

/// The level of each finding of that name, and what it says.
fn of<'a>(report: &'a CheckReport, name: &str) -> Vec<(&'a str, &'a str)> {
    let named = report.findings.iter().filter(|finding| finding.name == name);
    named
        .map(|finding| (finding.level.as_str(), finding.what.as_str()))
        .collect()
}

fn level<'a>(report: &'a CheckReport, name: &str) -> &'a str {
    let found = of(report, name);
    assert_eq!(found.len(), 1, "{name}: {report:?}");
    found[0].0
}

/// Waits until the capture of both pods of the first node is tested.
fn wait_until_tested(bed: &Bed) {
    wait_for("the pods to be tested", LONG, || {
        let report = bed.node("n1").check(&[])?;
        Ok(["pod shop/client", "pod shop/neighbour"]
            .iter()
            .all(|pod| of(&report, pod).iter().any(|(level, _)| *level == "ok")))
    })
    .unwrap();
}

#[test]
fn a_node_whose_agent_runs_is_well() {
    let bed = world("check well").start().unwrap();
    wait_until_tested(&bed);
    let report = check(&bed, &[]);
    for name in [
        "kernel",
        "capabilities",
        "cgroups",
        "bpffs",
        "listeners of others",
        "authority",
        "agent",
        "pods",
    ] {
        assert_eq!(level(&report, name), "ok", "{report:?}");
    }
    let (authority, pods) = (of(&report, "authority"), of(&report, "pods"));
    assert!(authority[0].1.contains("grants spiffe://"), "{authority:?}");
    assert!(pods[0].1.starts_with("2 of 2 in the mesh are captured"), "{pods:?}");
    assert!(of(&report, "pod shop/client")[0].1.contains("captured"), "{report:?}");
    assert!(report.succeeded, "{report:?}");
    // All of the host's other programs are warnings, so that what is here of others does not fail.
    assert_ne!(report.result, "failed");
}

#[test]
fn a_foreign_connect4_program_on_the_pods_cgroup_is_named() {
    const BPF_F_ALLOW_MULTI: u32 = 2;
    let bed = world("check foreign").start().unwrap();
    let cgroup = File::open(bed.node("n1").pods_cgroup()).unwrap();
    let program = net::load_allow_all().unwrap();
    net::attach_connect4(&cgroup, &program, BPF_F_ALLOW_MULTI).unwrap();
    let report = check(&bed, &[]);
    let path = bed.node("n1").pods_cgroup().display().to_string();
    let named = |(level, what): &(&str, &str)| *level == "warning" && what.ends_with(&format!("at connect4 of {path}"));
    let others = of(&report, "programs of others");
    assert!(others.iter().any(named), "{others:?}");
    assert!(report.succeeded, "a warning is no failure: {report:?}");
    net::detach_connect4(&cgroup, Some(&program)).unwrap();
    let others = check(&bed, &[]);
    assert!(!of(&others, "programs of others").iter().any(named), "{others:?}");
}

#[test]
fn a_listener_at_another_meshs_port_in_a_pod_is_named() {
    let bed = world("check listener").start().unwrap();
    let client = bed.pod("client");
    let _server = client.serve(|stage| net::echo_forever(stage, ("::", 15001))).unwrap();
    let report = check(&bed, &[]);
    let found = of(&report, "listeners of others");
    assert!(
        found
            .iter()
            .any(|(level, what)| *level == "warning" && what.contains("listens at port 15001 in pod")),
        "{found:?}"
    );
}

#[test]
fn a_ca_that_is_down_fails_with_advice() {
    let bed = world("check ca").start().unwrap();
    bed.kill_ca();
    let report = check(&bed, &[]);
    assert_eq!(level(&report, "authority"), "failed", "{report:?}");
    let finding = report
        .findings
        .iter()
        .find(|finding| finding.name == "authority")
        .unwrap();
    assert!(finding.what.contains("cannot be reached"), "{finding:?}");
    assert!(finding.advice.as_ref().unwrap().contains("--ca-address"), "{finding:?}");
    assert!(!report.succeeded && report.result == "failed");
    // The agent has its certificates.
    assert_eq!(level(&report, "agent"), "ok");
}

#[test]
fn a_token_that_the_ca_refuses_fails() {
    let bed = world("check token").start().unwrap();
    let token = bed.dir().join("bad-token");
    std::fs::write(&token, "no.token.at-all").unwrap();
    let report = check(&bed, &[&format!("--ca-token={}", token.display())]);
    let authority = of(&report, "authority");
    assert_eq!(authority[0].0, "failed", "{authority:?}");
    assert!(authority[0].1.contains("refused our token"), "{authority:?}");
}

#[test]
fn a_folder_off_any_bpffs_fails() {
    let bed = world("check bpffs").start().unwrap();
    let folder = bed.dir().join("no-bpffs");
    let report = check(&bed, &[&format!("--bpf-dir={}", folder.display())]);
    assert_eq!(level(&report, "bpffs"), "failed");
    assert!(!report.succeeded);
    assert!(!folder.exists(), "a check makes nothing");
}

#[test]
fn an_agent_that_was_killed_is_a_failure_and_one_that_never_was_is_not() {
    let bed = world("check killed").build().unwrap();
    bed.start_ca().unwrap();
    bed.introduce_ca().unwrap();
    let before = check(&bed, &[]);
    assert_eq!(level(&before, "agent"), "warning", "{before:?}");
    assert!(before.succeeded, "{before:?}");
    bed.node("n1").start().unwrap();
    bed.node("n1").kill();
    let after = check(&bed, &[]);
    assert_eq!(level(&after, "agent"), "failed", "{after:?}");
    assert!(!after.succeeded);
}

#[test]
fn what_is_said_to_people_is_a_line_for_each_finding() {
    let bed = Bed::builder("check text")
        .node("n1")
        .pod("n1", PodSpec::new("client").account("shop/client"))
        .start()
        .unwrap();
    let node = bed.node("n1");
    wait_for("the pod to be tested", SOON, || {
        Ok(of(&node.check(&[])?, "pod shop/client")
            .iter()
            .any(|(level, _)| *level == "ok"))
    })
    .unwrap();
    let text = node.check_text(&[]).unwrap();
    println!("{text}");
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("->"))
        .collect();
    assert_eq!(lines.len(), check(&bed, &[]).findings.len(), "{text}");
    assert!(
        lines.iter().all(|line| ["ok ", "warning ", "FAILED "]
            .iter()
            .any(|level| line.starts_with(level))),
        "{text}"
    );
}
