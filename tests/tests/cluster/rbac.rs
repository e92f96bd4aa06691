//! What each part of Adit may do with the Kubernetes API: what it must, and nothing more.

use std::collections::BTreeSet;

use adit_tests::cluster::{Cluster, PodSpec};

use crate::stage::{agent, await_captured, mesh_namespace, meshed};
use crate::world::World;

const SYSTEM: &str = "adit-system";

/// What `kubectl auth can-i --list` says, without what everybody may: `verb resource` or `verb resource/name`.
fn granted(cluster: &Cluster, namespace: &str, account: &str) -> BTreeSet<String> {
    let list = |user: &str, groups: &[&str]| -> BTreeSet<String> {
        let mut words = vec!["auth", "can-i", "--list", "--namespace", namespace, "--as", user];
        words.extend(groups.iter().flat_map(|group| ["--as-group", group]));
        let said = cluster.kubectl(words).unwrap();
        let rows = said
            .lines()
            .skip(1)
            .filter(|line| !line.starts_with(' '))
            .flat_map(|line| {
                let mut words = line.split_whitespace();
                let resource = words.next().unwrap_or_default().to_owned();
                // Columns: resource, URLs, names, verbs.
                let columns: Vec<&str> = line
                    .split('[')
                    .skip(1)
                    .map(|rest| rest.split(']').next().unwrap_or_default())
                    .collect();
                let (names, verbs) = (columns[1].to_owned(), columns[2].to_owned());
                verbs
                    .split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .map(move |verb| {
                        if names.is_empty() {
                            format!("{verb} {resource}")
                        } else {
                            format!("{verb} {resource}/{}", names.replace(' ', ","))
                        }
                    })
            });
        rows.collect()
    };
    let of_all = ["system:serviceaccounts", "system:authenticated"];
    let everybody = list("system:serviceaccount:nobody:nobody", &of_all);
    let account = list(&format!("system:serviceaccount:{SYSTEM}:{account}"), &of_all);
    account.difference(&everybody).cloned().collect()
}

fn rows(rows: &[&str]) -> BTreeSet<String> {
    let each = rows.iter().flat_map(|row| {
        let (verbs, resource) = row.split_once(' ').unwrap();
        verbs.split(',').map(move |verb| format!("{verb} {resource}"))
    });
    each.collect()
}

#[test]
fn each_part_may_do_what_it_must_and_nothing_more() {
    let (cluster, world) = (meshed(), World::new("rbac"));
    let agent = [
        "list,watch namespaces",
        "list,watch nodes",
        "list,watch pods",
        "list,watch services",
        "list,watch endpointslices.discovery.k8s.io",
        "list,watch servicecidrs.networking.k8s.io",
        "list,watch authorizationpolicies.security.istio.io",
        "list,watch peerauthentications.security.istio.io",
        "patch pods/status",
        "create,patch events.events.k8s.io",
    ];
    let authority = [
        "create tokenreviews.authentication.k8s.io",
        "list,watch namespaces",
        "list,watch nodes",
        "list,watch pods",
        "get,list,watch authorizationpolicies.security.istio.io",
        "get,list,watch peerauthentications.security.istio.io",
        "patch authorizationpolicies.security.istio.io/status",
        "patch peerauthentications.security.istio.io/status",
        "create,patch events.events.k8s.io",
        "create clustertrustbundles.certificates.k8s.io",
        "get,update clustertrustbundles.certificates.k8s.io/mesh.adit:ca:roots",
        "attest signers.certificates.k8s.io/mesh.adit/ca",
    ];
    let at_home = [
        "create secrets",
        "get,update secrets/adit-ca-key",
        "create configmaps",
        "get,update,watch configmaps/adit-ca-root",
        "get,update configmaps/adit-ca-rotation",
        "create leases.coordination.k8s.io",
        "get,update leases.coordination.k8s.io/adit-ca",
    ];
    for namespace in [SYSTEM, &world.namespace] {
        assert_eq!(
            granted(cluster, namespace, "adit-node"),
            rows(&agent),
            "adit-node in {namespace}"
        );
    }
    assert_eq!(granted(cluster, &world.namespace, "adit-ca"), rows(&authority));
    assert_eq!(
        granted(cluster, SYSTEM, "adit-ca"),
        rows(&[&authority[..], &at_home].concat())
    );
    // While nothing is being uninstalled, nobody may uninstall.
    assert_eq!(granted(cluster, SYSTEM, "adit-uninstall"), BTreeSet::new());
}

#[test]
fn an_agent_changes_one_condition_of_its_own_nodes_pods_and_nothing_else() {
    let (cluster, world) = (meshed(), World::new("status"));
    let shop = format!("{}-shop", world.namespace);
    mesh_namespace(cluster, &shop);
    for (name, node) in [("here", 1), ("there", 2)] {
        cluster.create(&PodSpec::new(name).namespace(&shop).node(node)).unwrap();
        cluster.await_ready(&shop, &format!("pod/{name}")).unwrap();
        await_captured(cluster, &shop, name, true);
    }
    // A token such as the agent of the first node has.
    let agent = agent(cluster, 1);
    let object = cluster.get(["pod", "--namespace", SYSTEM, &agent]).unwrap();
    let uid = object["metadata"]["uid"].as_str().unwrap();
    let bound = [
        "--bound-object-kind",
        "Pod",
        "--bound-object-name",
        &agent,
        "--bound-object-uid",
        uid,
    ];
    let words = ["create", "token", "--namespace", SYSTEM, "adit-node"]
        .into_iter()
        .chain(bound);
    let token = cluster.kubectl(words).unwrap();
    // Not by kubectl, which reads what it changes: no agent may.
    let server = server(cluster);
    let patch = |pod: &str, subresource: &str, patch: &str| -> (u64, String) {
        let url = format!("{server}/api/v1/namespaces/{shop}/pods/{pod}{subresource}");
        let token = format!("authorization: Bearer {}", token.trim());
        let kind = "content-type: application/strategic-merge-patch+json";
        let words = [
            "curl",
            "--silent",
            "--show-error",
            "--insecure",
            "--request",
            "PATCH",
            "--header",
            &token,
        ];
        let words = words.into_iter().chain(["--header", kind, "--data", patch, &url]);
        let answer = cluster.control_plane().run(words).unwrap();
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        let message = answer["message"].as_str().unwrap_or_default().to_owned();
        (answer["code"].as_u64().unwrap_or(200), message)
    };
    let condition =
        |kind: &str| format!(r#"{{"status":{{"conditions":[{{"type":"{kind}","status":"False","reason":"Test"}}]}}}}"#);
    let status = "/status";
    assert_eq!(patch("here", status, &condition("mesh.adit/Captured")).0, 200);
    for (pod, subresource, text, told) in [
        ("there", status, condition("mesh.adit/Captured"), "on its own node only"),
        ("here", status, condition("Ready"), "no condition but"),
        (
            "here",
            status,
            r#"{"status":{"phase":"Failed"}}"#.to_owned(),
            "nothing in a pod's status but",
        ),
        (
            "here",
            status,
            r#"{"metadata":{"labels":{"app":"other"}}}"#.to_owned(),
            "a pod's metadata",
        ),
        (
            "here",
            "",
            r#"{"metadata":{"labels":{"a":"b"}}}"#.to_owned(),
            "cannot patch",
        ),
    ] {
        let (code, refused) = patch(pod, subresource, &text);
        assert_eq!(code, 403, "{pod} {text}: {refused}");
        assert!(refused.contains(told), "{pod} {text}: {refused}");
    }
    cluster.kubectl(["delete", "namespace", "--wait=false", &shop]).unwrap();
}

/// Where the API server is, as the administrator's configuration says.
fn server(cluster: &Cluster) -> String {
    let path = "jsonpath={.clusters[0].cluster.server}";
    cluster.kubectl(["config", "view", "--output", path]).unwrap()
}
