//! The kubelet reaches its pods under whatever policy; nobody else does.

use std::io::Read as _;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use adit_tests::cluster::{BUSYBOX, PodSpec, condition};
use serde_json::{Value, json};

use crate::stage::{
    PATIENCE, SHOP, access, address, agent_log, await_access, await_captured, await_that, call, mesh_namespace, shop,
    strict,
};

/// Allows nobody to speak to pods of the namespace.
fn nobody(namespace: &str) -> Value {
    json!({
        "apiVersion": "security.istio.io/v1",
        "kind": "AuthorizationPolicy",
        "metadata": {"name": "nobody", "namespace": namespace},
        "spec": {},
    })
}

#[test]
fn probes_and_kubectl_reach_a_pod_to_which_policy_lets_nobody_and_other_processes_of_the_node_do_not() {
    let cluster = shop();
    let namespace = "probes";
    mesh_namespace(cluster, namespace);
    cluster.apply_json(&strict(namespace)).unwrap();
    cluster.apply_json(&nobody(namespace)).unwrap();
    let often = |mut probe: Value| {
        probe["periodSeconds"] = 1.into();
        probe["failureThreshold"] = 2.into();
        probe
    };
    let http = || often(json!({"httpGet": {"port": 8080, "path": "/"}}));
    let tcp = || often(json!({"tcpSocket": {"port": 8080}}));
    let grpc = || often(json!({"grpc": {"port": 9090}}));
    let exec = || often(json!({"exec": {"command": ["true"]}}));
    for (name, startup, readiness, liveness) in [
        ("http", http(), http(), tcp()),
        ("tcp", tcp(), tcp(), http()),
        ("grpc", grpc(), grpc(), grpc()),
    ] {
        let pod = PodSpec::new(name)
            .namespace(namespace)
            .node(1)
            .account("server")
            .args(["serve", "8080", "--grpc", "9090"]);
        let pod = pod
            .container("startupProbe", startup)
            .container("readinessProbe", readiness);
        cluster.create(&pod.container("livenessProbe", liveness)).unwrap();
    }
    let pod = PodSpec::new("exec").namespace(namespace).node(1).image(BUSYBOX);
    let pod = pod.args(["-c", "echo begun; sleep 3600"]);
    cluster
        .create(
            &pod.container("readinessProbe", exec())
                .container("livenessProbe", exec()),
        )
        .unwrap();
    let names = ["http", "tcp", "grpc", "exec"];
    for name in names {
        cluster.await_ready(namespace, &format!("pod/{name}")).unwrap();
        await_captured(cluster, namespace, name, true);
    }
    // Long enough for the threshold of each.
    sleep(Duration::from_secs(4));
    for name in names {
        let pod = cluster.get(["pod", "--namespace", namespace, name]).unwrap();
        let status = &pod["status"]["containerStatuses"][0];
        assert_eq!(
            (&status["restartCount"], &status["ready"]),
            (&json!(0), &json!(true)),
            "{pod}"
        );
    }
    for to in ["probes/http", "probes/grpc"] {
        let of_kubelet = access(cluster, 1, &[("destination.workload", to), ("command", "kubelet")]);
        assert!(of_kubelet.len() >= 6, "{of_kubelet:?}");
    }

    let to = address(cluster, namespace, "http");
    let grpc = address(cluster, namespace, "grpc").replace(":8080", ":9090");
    for (from, to) in [("client", &to), ("remote", &to), ("client", &grpc)] {
        let calls = call(cluster, SHOP, from, to, &["--count", "3", "--timeout", "2000"]);
        assert_eq!((calls.ok, calls.failed), (0, 3), "{from}: {calls:?}");
    }
    let dial = format!(
        "exec 3<>/dev/tcp/{} && echo hello >&3 && head -n 1 <&3 | sed 's/^/answer: /'",
        to.replace(':', "/")
    );
    let dial = format!("timeout 3 bash -c {dial:?} 2>&1; true");
    let said = cluster.node(1).run(["bash", "-c", &dial]).unwrap();
    assert!(!said.contains("answer: "), "{said}");

    assert_eq!(
        cluster.exec(namespace, "exec", ["echo", "here"]).unwrap().trim(),
        "here"
    );
    assert_eq!(
        cluster
            .kubectl(["logs", "--namespace", namespace, "exec"])
            .unwrap()
            .trim(),
        "begun"
    );
    let mut forward = cluster.kubectl_command().unwrap();
    forward.args(["port-forward", "--namespace", namespace, "pod/http", "18080:8080"]);
    let mut forward = forward.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut said = [0; 256];
    let length = forward.stdout.as_mut().unwrap().read(&mut said).unwrap();
    let ask = "exec 3<>/dev/tcp/127.0.0.1/18080 && echo hello >&3 && head -n 1 <&3";
    let answer = cluster.control_plane().run(["timeout", "5", "bash", "-c", ask]);
    forward.kill().unwrap();
    forward.wait().unwrap();
    let said = String::from_utf8_lossy(&said[..length]);
    assert!(
        answer.as_ref().is_ok_and(|answer| answer.starts_with("http ")),
        "{answer:?} {said}"
    );
}

#[test]
fn probes_pass_again_when_the_kubelet_is_in_another_cgroup() {
    let cluster = shop();
    let namespace = "moved";
    mesh_namespace(cluster, namespace);
    cluster.apply_json(&nobody(namespace)).unwrap();
    let probe = json!({"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1, "failureThreshold": 3});
    let pod = PodSpec::new("http").namespace(namespace).node(1).account("server");
    let pod = pod.args(["serve", "8080"]).container("readinessProbe", probe);
    cluster.create(&pod).unwrap();
    cluster.await_ready(namespace, "pod/http").unwrap();
    await_captured(cluster, namespace, "http", true);
    let fields = [
        ("destination.workload", "moved/http"),
        ("command", "kubelet"),
        ("how", "fin"),
    ];
    // And back, as other tests look for it there.
    for cgroup in ["elsewhere.service", "kubelet.service"] {
        let line = format!("the kubelet is in the cgroup /sys/fs/cgroup/system.slice/{cgroup}");
        let told = || agent_log(cluster, 1).matches(&line).count();
        let before = told();
        let script = format!(
            "cd /sys/fs/cgroup/unified/system.slice && mkdir -p {cgroup} && for process in /proc/[0-9]*; do \
             [ $(cat $process/comm) = kubelet ] && echo ${{process#/proc/}} > {cgroup}/cgroup.procs; done; true"
        );
        cluster.node(1).run(["sh", "-c", &script]).unwrap();
        await_that(&format!("the kubelet to be found in {cgroup}"), || told() > before);
        let passed = access(cluster, 1, &fields).len();
        await_access(cluster, 1, passed + 4, &fields);
        let args = ["pod", "--namespace", namespace, "http"];
        let is_ready = |pod: &Value| condition(pod, "Ready") == Some("True");
        cluster
            .await_object("the pod to be ready", PATIENCE, &args, is_ready)
            .unwrap();
    }
    cluster
        .kubectl(["delete", "namespace", "--wait=false", namespace])
        .unwrap();
}
