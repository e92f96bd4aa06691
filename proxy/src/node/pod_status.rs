//! Writing a pod's condition to the Kubernetes API.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use thiserror::Error;

use crate::mesh::{CAPTURED, Captured, Workload};

/// Who writes it.
const MANAGER: &str = "adit-node";
const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;

/// Why a condition was not written.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The pod is no more; another may have its name.
    #[error("the pod is no more")]
    Gone,
    /// The API server refuses, or does not answer.
    #[error("writing the condition {CAPTURED} of a pod: {0}; it needs the permission to patch pods/status")]
    Api(Box<kube::Error>),
}

/// The statuses of pods.
pub struct PodStatus {
    client: Client,
}

impl PodStatus {
    /// Those that this client may write.
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Makes the pod's condition this one, or removes it. `turns` tells whether its status is another than before.
    pub async fn write(&self, pod: &Workload, condition: Option<&Captured>, turns: bool) -> Result<(), WriteError> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let now = turns.then(Timestamp::now);
        let patch = Patch::Strategic(patch(&pod.uid, condition, now));
        let params = PatchParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PatchParams::default()
        };
        match api.patch_status(&pod.name, &params, &patch).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if matches!(status.code, NOT_FOUND | CONFLICT) => Err(WriteError::Gone),
            Err(error) => Err(WriteError::Api(Box::new(error))),
        }
    }
}

/// The strategic merge patch. It is refused where the pod of that name has another uid.
fn patch(uid: &str, condition: Option<&Captured>, turned: Option<Timestamp>) -> Value {
    let condition = match condition {
        None => json!({ "$patch": "delete", "type": CAPTURED }),
        Some(condition) => {
            let mut value = json!({
                "type": CAPTURED,
                "status": if condition.status { "True" } else { "False" },
                "reason": condition.reason,
                "message": condition.message,
            });
            if let Some(at) = turned.and_then(|at| Timestamp::from_second(at.as_second()).ok()) {
                value["lastTransitionTime"] = Value::from(at.to_string());
            }
            value
        }
    };
    json!({ "metadata": { "uid": uid }, "status": { "conditions": [condition] } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_names_the_pods_uid_and_only_its_own_condition() {
        let captured = Captured {
            status: true,
            reason: "Captured".to_owned(),
            message: "so it is".to_owned(),
        };
        let at = Timestamp::from_second(1_700_000_000).unwrap();
        let expected = json!({
            "metadata": { "uid": "u" },
            "status": { "conditions": [{
                "type": "mesh.adit/Captured", "status": "True", "reason": "Captured", "message": "so it is",
                "lastTransitionTime": "2023-11-14T22:13:20Z",
            }] },
        });
        assert_eq!(patch("u", Some(&captured), Some(at)), expected);
        let kept = patch("u", Some(&captured), None);
        assert!(kept["status"]["conditions"][0].get("lastTransitionTime").is_none());
        let removed = json!([{ "$patch": "delete", "type": "mesh.adit/Captured" }]);
        assert_eq!(patch("u", None, Some(at))["status"]["conditions"], removed);
    }
}
