//! Pods that are never enrolled, whatever their labels say.

use crate::mesh::Workload;

/// What the names of runtime classes contain whose pods have a network stack of their own, which no program of the
/// node's kernel sees.
const SANDBOXED: [&str; 3] = ["gvisor", "runsc", "kata"];

/// Why a pod is never enrolled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bar {
    /// It is in the node's own network namespace.
    HostNetwork,
    /// Its connections are not the node's kernel's; by this runtime class.
    Sandboxed(String),
}

impl Bar {
    /// In a word, as reasons of conditions and events are.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::HostNetwork => "HostNetwork",
            Self::Sandboxed(_) => "SandboxedRuntime",
        }
    }
}

impl std::fmt::Display for Bar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HostNetwork => f.write_str(
                "the pod is in the node's own network namespace, which is never enrolled: its connections are the \
                 node's, and carry no identity; remove hostNetwork, or label the pod mesh.adit/mode=disabled",
            ),
            Self::Sandboxed(class) => write!(
                f,
                "the pod's runtime class {class} has a network stack of its own, which the node's kernel does not see: \
                 the pod is never enrolled; use another runtime class, or label the pod mesh.adit/mode=disabled"
            ),
        }
    }
}

/// Why a pod that its labels want in the mesh is not enrolled. None: it can be, or is not wanted.
pub fn barred(workload: &Workload) -> Option<Bar> {
    let pod = workload.pod.as_ref().filter(|pod| pod.labelled && !pod.finished)?;
    if pod.host_network {
        return Some(Bar::HostNetwork);
    }
    let class = pod.runtime_class.as_deref()?;
    let lower = class.to_ascii_lowercase();
    let sandboxed = SANDBOXED.iter().any(|name| lower.contains(name));
    sandboxed.then(|| Bar::Sandboxed(class.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::mesh::{PodDetails, test_workload};

    #[test]
    fn pods_whose_connections_are_not_their_own_namespaces_are_barred() {
        for (labelled, host_network, class, reason) in [
            (true, false, None, None),
            (true, false, Some("nvidia"), None),
            (true, true, None, Some("HostNetwork")),
            (false, true, None, None),
            (true, false, Some("gvisor"), Some("SandboxedRuntime")),
            (true, false, Some("kata-qemu"), Some("SandboxedRuntime")),
            (true, false, Some("Runsc"), Some("SandboxedRuntime")),
            (false, false, Some("kata"), None),
        ] {
            let mut workload = test_workload("shop", "cart", "10.0.0.1");
            workload.pod = Some(Arc::new(PodDetails {
                labelled,
                host_network,
                runtime_class: class.map(Arc::from),
                ..PodDetails::default()
            }));
            let bar = barred(&workload);
            assert_eq!(
                bar.as_ref().map(Bar::reason),
                reason,
                "{labelled} {host_network} {class:?}"
            );
        }
        assert_eq!(barred(&test_workload("shop", "cart", "10.0.0.1")), None);
    }
}
