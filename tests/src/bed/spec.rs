//! What a bed is to consist of.

use std::collections::BTreeMap;

/// A pod to be.
#[derive(Debug, Clone)]
pub struct PodSpec {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) account: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) ports: BTreeMap<String, u16>,
    pub(super) policies: Vec<String>,
    pub(super) extra_addresses: u8,
    pub(super) membership: Membership,
    pub(super) ipv6: bool,
    pub(super) own_users: bool,
    pub(super) sandbox: bool,
    pub(super) uid: Option<String>,
    pub(super) cgroup: Option<String>,
}

/// How a pod stands to the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Membership {
    /// Enrolled on its node and reached over HBONE.
    Enrolled,
    /// Listed in the mesh file, but with plain TCP and not enrolled.
    Outside,
    /// Not in the mesh file at all.
    Unknown,
}

impl PodSpec {
    /// A pod in the mesh with the service account `default/default` and the label `app: <name>`.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            account: "default".to_owned(),
            labels: BTreeMap::from([("app".to_owned(), name.to_owned())]),
            ports: BTreeMap::new(),
            policies: Vec::new(),
            extra_addresses: 0,
            membership: Membership::Enrolled,
            ipv6: true,
            own_users: false,
            sandbox: true,
            uid: None,
            cgroup: None,
        }
    }

    /// Its service account, `namespace/name`; the pod is in that namespace.
    pub fn account(mut self, account: &str) -> Self {
        let (namespace, name) = account.split_once('/').unwrap_or(("default", account));
        self.namespace = namespace.to_owned();
        self.account = name.to_owned();
        self
    }

    /// A label, for the selectors of services and policies.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// A named container port.
    pub fn port(mut self, name: &str, port: u16) -> Self {
        self.ports.insert(name.to_owned(), port);
        self
    }

    /// A policy of workload scope that the workload lists, `namespace/name`.
    pub fn policy(mut self, name: &str) -> Self {
        self.policies.push(name.to_owned());
        self
    }

    /// So many addresses more of each family.
    pub fn extra_addresses(mut self, count: u8) -> Self {
        self.extra_addresses = count;
        self
    }

    /// Without the process that keeps a pod outside the mesh alive from its birth on: the first that runs in it is born
    /// with it.
    pub fn unborn(mut self) -> Self {
        self.sandbox = false;
        self
    }

    /// With this uid, by which alone the proxy is to find its network namespace, and this cgroup among the pods', named as
    /// a kubelet would.
    pub fn kubelets(mut self, uid: &str, cgroup: &str) -> Self {
        (self.uid, self.cgroup) = (Some(uid.to_owned()), Some(cgroup.to_owned()));
        self
    }

    /// Known to the mesh as a workload that speaks plain TCP; not enrolled.
    pub fn outside(mut self) -> Self {
        self.membership = Membership::Outside;
        self
    }

    /// Not known to the mesh at all; not enrolled.
    pub fn unknown(mut self) -> Self {
        self.membership = Membership::Unknown;
        self
    }

    /// With a network namespace that belongs to a user namespace of its own, as with `hostUsers: false`.
    pub fn own_users(mut self) -> Self {
        self.own_users = true;
        self
    }

    /// Without IPv6: switched off by sysctl in its namespace.
    pub fn ipv4_only(mut self) -> Self {
        self.ipv6 = false;
        self
    }
}

/// A service to be; its virtual addresses are given by the bed and routed nowhere: only Adit resolves them.
#[derive(Debug, Clone)]
pub struct ServiceSpec {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) ports: Vec<(u16, String)>,
    pub(super) selector: BTreeMap<String, String>,
    pub(super) endpoints: Vec<String>,
    pub(super) distribution: Option<String>,
}

impl ServiceSpec {
    /// A service `namespace/name`.
    pub fn new(name: &str) -> Self {
        let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
        Self {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            ports: Vec::new(),
            selector: BTreeMap::new(),
            endpoints: Vec::new(),
            distribution: None,
        }
    }

    /// A port and the number or name of the endpoints' port it leads to.
    pub fn port(mut self, port: u16, target: impl ToString) -> Self {
        self.ports.push((port, target.to_string()));
        self
    }

    /// The label that its endpoints bear.
    pub fn selector(mut self, key: &str, value: &str) -> Self {
        self.selector.insert(key.to_owned(), value.to_owned());
        self
    }

    /// A pod that is an endpoint, if there is no selector; of another namespace as `namespace/name`.
    pub fn endpoint(mut self, pod: &str) -> Self {
        self.endpoints.push(pod.to_owned());
        self
    }

    /// Which endpoints are preferred, as in the mesh file.
    pub fn distribution(mut self, distribution: &str) -> Self {
        self.distribution = Some(distribution.to_owned());
        self
    }
}
