//! Pods as tests want them, as manifests.

use serde_json::{Map, Value, json};

use super::images::TOOL;
use super::layout::Machine;

/// A pod of one container. Without more it is one of [`TOOL`] that does nothing, in `default`, on any node.
#[derive(Debug, Clone)]
pub struct PodSpec {
    name: String,
    namespace: String,
    labels: Map<String, Value>,
    annotations: Map<String, Value>,
    spec: Map<String, Value>,
    container: Map<String, Value>,
}

impl PodSpec {
    /// A pod of this name, which it has as label `app` too.
    pub fn new(name: &str) -> PodSpec {
        let container = json!({"name": "main", "image": TOOL, "imagePullPolicy": "Never", "args": ["pause"]});
        // A test does not wait for a pod to say good-bye.
        let spec = json!({"terminationGracePeriodSeconds": 1});
        PodSpec {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            labels: Map::from_iter([("app".to_owned(), name.into())]),
            annotations: Map::new(),
            spec: spec.as_object().cloned().unwrap_or_default(),
            container: container.as_object().cloned().unwrap_or_default(),
        }
    }

    /// In another namespace.
    pub fn namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.namespace);
        self
    }

    /// On this node, counted from 1, whatever the scheduler thinks.
    pub fn node(self, number: u8) -> Self {
        self.with(
            "nodeSelector",
            json!({"kubernetes.io/hostname": Machine::Node(number).to_string()}),
        )
    }

    /// As this service account, which must exist.
    pub fn account(self, account: &str) -> Self {
        self.with("serviceAccountName", account.into())
    }

    /// With another label.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.into());
        self
    }

    /// With an annotation.
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.into());
        self
    }

    /// Of another image.
    pub fn image(self, image: &str) -> Self {
        self.container("image", image.into())
    }

    /// With these arguments: of [`TOOL`], `["serve", "8080"]` and the like.
    pub fn args<'a>(self, args: impl IntoIterator<Item = &'a str>) -> Self {
        let args: Vec<&str> = args.into_iter().collect();
        self.container("args", json!(args))
    }

    /// In the node's network.
    pub fn host_network(self) -> Self {
        self.with("hostNetwork", true.into())
    }

    /// Another field of the pod's `spec`.
    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.spec.insert(field.to_owned(), value);
        self
    }

    /// Another field of the container.
    pub fn container(mut self, field: &str, value: Value) -> Self {
        self.container.insert(field.to_owned(), value);
        self
    }

    /// The manifest of the pod.
    pub fn manifest(&self) -> Value {
        let mut manifest = self.template();
        manifest["apiVersion"] = "v1".into();
        manifest["kind"] = "Pod".into();
        manifest["metadata"]["name"] = self.name.as_str().into();
        manifest["metadata"]["namespace"] = self.namespace.as_str().into();
        manifest
    }

    /// The same as a `template` of a Deployment, StatefulSet, DaemonSet or Job.
    pub fn template(&self) -> Value {
        let mut spec = self.spec.clone();
        spec.insert("containers".to_owned(), json!([self.container]));
        json!({"metadata": {"labels": self.labels, "annotations": self.annotations}, "spec": spec})
    }

    /// The manifest of a Deployment of such pods.
    pub fn deployment(&self, replicas: u32) -> Value {
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": self.name}},
                "template": self.template(),
            },
        })
    }

    /// The manifest of a service of this name for such pods.
    pub fn service(&self, port: u16, target: u16) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {"selector": {"app": self.name}, "ports": [{"port": port, "targetPort": target}]},
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_what_it_was_asked_to_be() {
        let pod = PodSpec::new("web")
            .namespace("shop")
            .node(2)
            .account("web")
            .args(["serve", "8080"]);
        let manifest = pod.manifest();
        assert_eq!(manifest["metadata"]["labels"]["app"], "web");
        assert_eq!(manifest["spec"]["nodeSelector"]["kubernetes.io/hostname"], "n2");
        assert_eq!(manifest["spec"]["containers"][0]["args"], json!(["serve", "8080"]));
        assert_eq!(pod.service(80, 8080)["spec"]["ports"][0]["targetPort"], 8080);
    }
}
