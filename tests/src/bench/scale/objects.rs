//! The objects of a large cluster, as its controllers and kubelets would write them, and what changes of them.

use http::Method;
use serde_json::{Value, json};

use super::api::Request;

pub(super) const NODES: usize = 500;
pub(super) const PODS: usize = 10_000;
/// Of each service.
const ENDPOINTS: usize = 20;
const SERVICES: usize = PODS / ENDPOINTS;
/// Every other one is enrolled.
const NAMESPACES: usize = 100;
/// Which pods one batch of changes is about: spread over services and nodes.
const STRIDE: usize = 7;
const CREATED: &str = "2026-01-01T00:00:00Z";

pub(super) fn node(index: usize) -> String {
    format!("w{index}")
}

fn service(pod: usize) -> usize {
    pod / ENDPOINTS
}

fn namespace(service: usize) -> String {
    format!("ns{}", service % NAMESPACES)
}

/// Of a namespace, or of a service in it.
fn is_enrolled(index: usize) -> bool {
    index.is_multiple_of(2)
}

fn name(pod: usize) -> String {
    format!("app-{}-7c9f-{pod:05}", service(pod))
}

fn pods_path(pod: usize) -> String {
    format!("/api/v1/namespaces/{}/pods", namespace(service(pod)))
}

fn pod_range(node: usize) -> String {
    format!("10.{}.{}.", 128 + node / 256, node % 256)
}

fn address(pod: usize) -> String {
    format!("{}{}", pod_range(pod % NODES), 2 + pod / NODES)
}

/// Namespaces, their service accounts, and nodes.
pub(super) fn places() -> Vec<Request> {
    let namespaces = (0..NAMESPACES).map(|index| {
        let labels = match is_enrolled(index) {
            true => json!({"mesh.adit/mode": "enabled"}),
            false => json!({}),
        };
        let body = json!({"metadata": {"name": format!("ns{index}"), "labels": labels}});
        Request::new(Method::POST, "/api/v1/namespaces", body)
    });
    // Their controller does not run.
    let accounts = (0..NAMESPACES).map(|index| {
        let path = format!("/api/v1/namespaces/ns{index}/serviceaccounts");
        Request::new(Method::POST, path, json!({"metadata": {"name": "default"}}))
    });
    let nodes = (0..NODES).map(|index| {
        let range = format!("{}0/24", pod_range(index));
        let labels = json!({"topology.kubernetes.io/zone": format!("z{}", index % 3)});
        let body = json!({
            "metadata": {"name": node(index), "labels": labels},
            "spec": {"podCIDR": range, "podCIDRs": [range]},
        });
        Request::new(Method::POST, "/api/v1/nodes", body)
    });
    namespaces.chain(accounts).chain(nodes).collect()
}

/// A pod of a usual size: some 5 KB in the API's binary encoding.
pub(super) fn created(pod: usize) -> Request {
    let app = format!("app-{}", service(pod));
    let settings: Vec<_> = (0..12)
        .map(|index| json!({"name": format!("SETTING_{index}"), "value": format!("value-{index}-of-a-setting")}))
        .collect();
    let body = json!({
        "metadata": {
            "name": name(pod),
            "labels": {
                "app": app, "app.kubernetes.io/name": app, "app.kubernetes.io/version": "1.2.3",
                "pod-template-hash": "7c9f", "tier": "backend", "team": "payments",
            },
            "annotations": {
                "prometheus.io/scrape": "true", "prometheus.io/port": "9090", "checksum/config": "a".repeat(64),
            },
        },
        "spec": {
            "nodeName": node(pod % NODES),
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{
                "name": "app",
                "image": "registry.example/app/server:1.2.3",
                "ports": [{"containerPort": 8080, "name": "http"}, {"containerPort": 9090, "name": "metrics"}],
                "env": settings,
                "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
                "livenessProbe": {"httpGet": {"path": "/healthz", "port": 8080}},
                "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}},
                "volumeMounts": [{"name": "config", "mountPath": "/etc/app"}],
            }],
            "volumes": [{"name": "config", "configMap": {"name": "app"}}],
        },
    });
    Request::new(Method::POST, pods_path(pod), body)
}

/// What its kubelet and agent say of it once it runs.
pub(super) fn status(pod: usize, ready: bool, captured: bool) -> Request {
    let address = address(pod);
    let condition = |kind: &str, holds: bool| {
        let status = if holds { "True" } else { "False" };
        json!({"type": kind, "status": status, "lastTransitionTime": CREATED})
    };
    let body = json!({"status": {
        "phase": "Running",
        "hostIP": "10.0.0.1",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": CREATED,
        "conditions": [
            condition("PodReadyToStartContainers", true),
            condition("Initialized", true),
            condition("Ready", ready),
            condition("ContainersReady", ready),
            condition("PodScheduled", true),
            condition("mesh.adit/Captured", captured),
        ],
        "containerStatuses": [{
            "name": "app",
            "ready": ready,
            "restartCount": 0,
            "image": "registry.example/app/server:1.2.3",
            "imageID": format!("sha256:{}", "b".repeat(64)),
            "containerID": format!("containerd://{}", "c".repeat(64)),
            "state": {"running": {"startedAt": CREATED}},
        }],
    }});
    Request::new(Method::PATCH, format!("{}/{}/status", pods_path(pod), name(pod)), body)
}

pub(super) fn services() -> Vec<Request> {
    let ports = json!([{"name": "http", "port": 80, "targetPort": "http"},
                       {"name": "metrics", "port": 9090, "targetPort": "metrics"}]);
    (0..SERVICES)
        .map(|service| {
            let body = json!({"metadata": {"name": format!("app-{service}")}, "spec": {"ports": ports}});
            let path = format!("/api/v1/namespaces/{}/services", namespace(service));
            Request::new(Method::POST, path, body)
        })
        .collect()
}

pub(super) fn slices(uids: &[String]) -> Vec<Request> {
    let create = |service| Request::new(Method::POST, slices_path(service), slice(service, uids));
    (0..SERVICES).map(create).collect()
}

fn slices_path(service: usize) -> String {
    let namespace = namespace(service);
    format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices")
}

fn slice(service: usize, uids: &[String]) -> Value {
    let name = format!("app-{service}");
    let endpoints: Vec<_> = (service * ENDPOINTS..(service + 1) * ENDPOINTS)
        .map(|pod| {
            json!({
                "addresses": [address(pod)],
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "nodeName": node(pod % NODES),
                "zone": format!("z{}", pod % NODES % 3),
                "targetRef": {"kind": "Pod", "namespace": namespace(service), "name": self::name(pod), "uid": uids[pod]},
            })
        })
        .collect();
    json!({
        "metadata": {"name": format!("{name}-abc"), "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "metrics", "port": 9090, "protocol": "TCP"}],
        "endpoints": endpoints,
    })
}

/// So many pods have become ready, or are no longer.
pub(super) fn turned(count: usize, ready: bool) -> Vec<Request> {
    spread(count).map(|pod| status(pod, ready, true)).collect()
}

/// So many pods have been captured by their agents, or have been lost: others reach them in another way from then on.
pub(super) fn captured(count: usize, captured: bool) -> Vec<Request> {
    spread(count).map(|pod| status(pod, true, captured)).collect()
}

/// Enrolled pods of all services and nodes.
fn spread(count: usize) -> impl Iterator<Item = usize> {
    let all = (0..PODS).map(|index| index * STRIDE % PODS);
    all.filter(|pod| is_enrolled(service(*pod))).take(count)
}

/// All pods of so many services, one of each in turn, as in updates that roll.
pub(super) fn rolled(services: usize) -> Vec<usize> {
    (0..ENDPOINTS)
        .flat_map(|endpoint| (0..services).map(move |service| service * ENDPOINTS + endpoint))
        .collect()
}

pub(super) fn deleted(pod: usize) -> Request {
    Request::new(Method::DELETE, format!("{}/{}", pods_path(pod), name(pod)), json!({}))
}

/// The slice of the pod's service once the pod has this uid.
pub(super) fn endpoint_replaced(pod: usize, uid: &str, uids: &mut [String]) -> Request {
    uid.clone_into(&mut uids[pod]);
    let service = service(pod);
    let path = format!("{}/app-{service}-abc", slices_path(service));
    Request::new(Method::PUT, path, slice(service, uids))
}
