//! One immutable state of the mesh and its indexes.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::shards::Shards;
use super::{MeshError, Node, Policy, PolicySet, Protocol, Scope, Service, Subject, TargetPort, Unlisted, Workload};
use crate::identity::{SpiffeId, TrustDomain};

/// What a mesh is built from.
#[derive(Debug, Clone)]
pub struct MeshParts {
    /// The trust domain of all its identities.
    pub trust_domain: TrustDomain,
    /// The cluster's DNS domain, such as `cluster.local`.
    pub cluster_domain: Arc<str>,
    /// Where the addresses of the cluster's pods and services lie, as far as that is known.
    pub cluster_ranges: Vec<IpNet>,
    /// What a pod is that the source does not list.
    pub unlisted: Unlisted,
    /// The nodes. A workload may be on one that is not named here.
    pub nodes: Vec<Node>,
    /// The workloads, in the mesh and outside.
    pub workloads: Vec<Workload>,
    /// The services. Endpoints whose workload is not there are passed over until it is.
    pub services: Vec<Service>,
    /// The policies.
    pub policies: Vec<Policy>,
}

impl MeshParts {
    /// Parts of an empty mesh.
    pub fn new(trust_domain: TrustDomain, cluster_domain: &str) -> Self {
        Self {
            trust_domain,
            cluster_domain: cluster_domain.into(),
            cluster_ranges: Vec::new(),
            unlisted: Unlisted::default(),
            nodes: Vec::new(),
            workloads: Vec::new(),
            services: Vec::new(),
            policies: Vec::new(),
        }
    }
}

/// One immutable, checked state of the mesh. Addresses are looked up alike in their v4-mapped form. A clone costs little.
#[derive(Debug, Clone)]
pub struct Mesh {
    trust_domain: TrustDomain,
    cluster_domain: Arc<str>,
    pub(super) cluster_ranges: Vec<IpNet>,
    pub(super) unlisted: Unlisted,
    pub(super) nodes: Shards<Arc<str>, Arc<Node>>,
    pub(super) workloads: Shards<Arc<str>, Arc<Workload>>,
    pub(super) workloads_by_address: Shards<IpAddr, Arc<Workload>>,
    pub(super) workloads_by_node: Shards<Arc<str>, Vec<Arc<Workload>>>,
    pub(super) services: Shards<Arc<str>, Arc<Service>>,
    pub(super) services_by_address: Shards<IpAddr, Arc<Service>>,
    pub(super) policies: Arc<PolicySet>,
}

impl Mesh {
    /// Checks the parts and indexes them.
    pub fn build(parts: MeshParts) -> Result<Self, MeshError> {
        let mut mesh = Self::empty(parts.trust_domain, parts.cluster_domain, parts.unlisted);
        mesh.cluster_ranges = parts.cluster_ranges;
        mesh.policies = Arc::new(index_policies(parts.policies)?);
        for node in parts.nodes {
            mesh.add_node(node)?;
        }
        let mut workloads = Vec::with_capacity(parts.workloads.len());
        for workload in parts.workloads {
            workloads.push(mesh.add_workload(workload)?);
        }
        mesh.index_addresses(&workloads)?;
        for service in parts.services {
            mesh.add_service(service)?;
        }
        Ok(mesh)
    }

    /// A mesh in which there is nothing.
    pub fn empty(trust_domain: TrustDomain, cluster_domain: Arc<str>, unlisted: Unlisted) -> Self {
        Self {
            trust_domain,
            cluster_domain,
            cluster_ranges: Vec::new(),
            unlisted,
            nodes: Shards::default(),
            workloads: Shards::default(),
            workloads_by_address: Shards::default(),
            workloads_by_node: Shards::default(),
            services: Shards::default(),
            services_by_address: Shards::default(),
            policies: Arc::default(),
        }
    }
    /// The trust domain of its identities.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    /// The cluster's DNS domain.
    pub fn cluster_domain(&self) -> &str {
        &self.cluster_domain
    }

    /// Where the addresses of the cluster's pods and services lie; none where that is not known.
    pub fn cluster_ranges(&self) -> &[IpNet] {
        &self.cluster_ranges
    }

    /// What a pod is that it does not list.
    pub fn unlisted(&self) -> Unlisted {
        self.unlisted
    }

    /// The node of that name.
    pub fn node(&self, name: &str) -> Option<&Arc<Node>> {
        self.nodes.get(name)
    }

    /// All nodes, in no order.
    pub fn nodes(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.nodes.values()
    }

    /// The workload of that uid.
    pub fn workload_by_uid(&self, uid: &str) -> Option<&Arc<Workload>> {
        self.workloads.get(uid)
    }

    /// The workload that has the address: where a ready one and others claim it, the ready one.
    pub fn workload_by_addr(&self, address: IpAddr) -> Option<&Arc<Workload>> {
        self.workloads_by_address.get(&address.to_canonical())
    }

    /// All workloads, in no order.
    pub fn workloads(&self) -> impl Iterator<Item = &Arc<Workload>> {
        self.workloads.values()
    }

    /// How many workloads there are.
    pub fn workload_count(&self) -> usize {
        self.workloads.len()
    }

    /// The workloads of a node, in the mesh and outside, in the source's order.
    pub fn local_workloads(&self, node: &str) -> impl Iterator<Item = &Arc<Workload>> {
        self.workloads_by_node.get(node).into_iter().flatten()
    }

    /// Whether a workload of that identity that is in the mesh runs on the node: what entitles the node's proxy to the
    /// identity's certificate.
    pub fn runs_on(&self, identity: &SpiffeId, node: &str) -> bool {
        self.local_workloads(node)
            .any(|workload| workload.protocol == Protocol::Hbone && workload.identity == *identity)
    }

    /// The service that has the virtual address.
    pub fn service_by_addr(&self, address: IpAddr) -> Option<&Arc<Service>> {
        self.services_by_address.get(&address.to_canonical())
    }

    /// The service of that `namespace/name`.
    pub fn service_by_name(&self, name: &str) -> Option<&Arc<Service>> {
        self.services.get(name)
    }

    /// All services, in no order.
    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.services.values()
    }

    /// The policies.
    pub fn policies(&self) -> &PolicySet {
        &self.policies
    }

    fn add_node(&mut self, mut node: Node) -> Result<(), MeshError> {
        let subject = Subject::Node(Arc::clone(&node.name));
        check_addresses(&mut node.addresses, &node.name, &subject)?;
        let name = Arc::clone(&node.name);
        match self.nodes.insert(Arc::clone(&name), Arc::new(node)) {
            None => Ok(()),
            Some(_) => Err(MeshError::DuplicateNode { name }),
        }
    }

    fn add_workload(&mut self, mut workload: Workload) -> Result<Arc<Workload>, MeshError> {
        let uid = Arc::clone(&workload.uid);
        if uid.is_empty() || workload.name.is_empty() {
            let namespace = workload.namespace;
            return Err(MeshError::UnnamedWorkload { uid, namespace });
        }
        let subject = Subject::Workload(Arc::clone(&uid));
        check_addresses(&mut workload.addresses, &uid, &subject)?;
        if workload.ports.values().any(|port| *port == 0) {
            return Err(MeshError::PortZero { owner: uid, subject });
        }
        for policy in &workload.policies {
            let proper = policy.split('/').count() == 2 && policy.split('/').all(|part| !part.is_empty());
            if !proper {
                return Err(MeshError::ListedPolicyName {
                    workload: uid,
                    policy: Arc::clone(policy),
                });
            }
        }
        let mut seen = HashSet::new();
        workload.policies.retain(|policy| seen.insert(Arc::clone(policy)));

        let workload = Arc::new(workload);
        if self.workloads.insert(Arc::clone(&uid), Arc::clone(&workload)).is_some() {
            return Err(MeshError::DuplicateUid { uid });
        }
        if !workload.node.is_empty() {
            let mut on = self.workloads_by_node.remove(&workload.node).unwrap_or_default();
            on.push(Arc::clone(&workload));
            self.workloads_by_node.insert(Arc::clone(&workload.node), on);
        }
        Ok(workload)
    }

    /// A finished pod may still be listed when its address is another's already: the ready one has it, whichever came
    /// first. Two alike leave open whose connections they are, and no guess is made.
    fn index_addresses(&mut self, workloads: &[Arc<Workload>]) -> Result<(), MeshError> {
        for ready in [true, false] {
            for workload in workloads.iter().filter(|workload| workload.ready == ready) {
                for address in &workload.addresses {
                    match self.workloads_by_address.get(address) {
                        None => {
                            self.workloads_by_address.insert(*address, Arc::clone(workload));
                        }
                        Some(other) if other.ready == ready => {
                            return Err(MeshError::DuplicateAddress {
                                address: *address,
                                first: Arc::clone(&other.uid),
                                second: Arc::clone(&workload.uid),
                            });
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        Ok(())
    }

    fn add_service(&mut self, mut service: Service) -> Result<(), MeshError> {
        let name: Arc<str> = format!("{}/{}", service.namespace, service.name).into();
        if service.name.is_empty() || service.namespace.is_empty() {
            return Err(MeshError::UnnamedService { name });
        }
        let subject = Subject::Service(Arc::clone(&name));
        check_addresses(&mut service.addresses, &name, &subject)?;
        let mut seen = HashSet::new();
        for port in &service.ports {
            if port.port == 0 || port.target == TargetPort::Number(0) {
                return Err(MeshError::PortZero { owner: name, subject });
            }
            if !seen.insert(port.port) {
                return Err(MeshError::DuplicateServicePort {
                    service: name,
                    port: port.port,
                });
            }
        }
        let mut seen = HashSet::new();
        service.endpoints.retain(|endpoint| seen.insert(endpoint.clone()));

        let service = Arc::new(service);
        for address in &service.addresses {
            if let Some(other) = self.services_by_address.insert(*address, Arc::clone(&service)) {
                return Err(MeshError::DuplicateServiceAddress {
                    address: *address,
                    first: format!("{}/{}", other.namespace, other.name).into(),
                    second: name,
                });
            }
        }
        match self.services.insert(Arc::clone(&name), service) {
            None => Ok(()),
            Some(_) => Err(MeshError::DuplicateService { name }),
        }
    }
}

/// Makes the addresses canonical and unique, and refuses those that nobody can be reached at.
fn check_addresses(addresses: &mut Vec<IpAddr>, owner: &Arc<str>, subject: &Subject) -> Result<(), MeshError> {
    let mut seen = HashSet::new();
    addresses
        .iter_mut()
        .for_each(|address| *address = address.to_canonical());
    addresses.retain(|address| seen.insert(*address));
    match addresses
        .iter()
        .find(|address| address.is_unspecified() || address.is_loopback() || address.is_multicast())
    {
        None => Ok(()),
        Some(address) => Err(MeshError::ImpossibleAddress {
            address: *address,
            owner: Arc::clone(owner),
            subject: subject.clone(),
        }),
    }
}

pub(super) fn index_policies(policies: Vec<Policy>) -> Result<PolicySet, MeshError> {
    let mut seen = HashSet::new();
    for policy in &policies {
        let key = policy.key();
        let proper = !policy.name().is_empty()
            && !policy.name().contains('/')
            && !key.starts_with('/')
            && (policy.scope == Scope::Global || !policy.namespace().is_empty());
        if !proper {
            return Err(MeshError::PolicyName { key: Arc::clone(key) });
        }
        if !seen.insert(Arc::clone(key)) {
            return Err(MeshError::DuplicatePolicy { key: Arc::clone(key) });
        }
    }
    Ok(PolicySet::new(policies))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::mesh::{Action, SameNode, ServiceEndpoint, ServicePort, TrafficDistribution};

    pub(crate) fn parts() -> MeshParts {
        MeshParts::new(TrustDomain::parse("cluster.local").unwrap(), "cluster.local")
    }

    /// A ready workload in the mesh, on node `n1`, whose service account has its name.
    pub(crate) fn workload(namespace: &str, name: &str, address: &str) -> Workload {
        Workload {
            uid: format!("{namespace}/{name}").into(),
            name: name.into(),
            namespace: namespace.into(),
            identity: SpiffeId::new(&TrustDomain::parse("cluster.local").unwrap(), namespace, name).unwrap(),
            node: "n1".into(),
            addresses: vec![address.parse().unwrap()],
            ports: BTreeMap::new(),
            protocol: Protocol::Hbone,
            same_node: SameNode::Direct,
            labels: BTreeMap::new(),
            zone: "".into(),
            policies: Vec::new(),
            ready: true,
            exclusions: None,
            netns: None,
            pod: None,
        }
    }

    pub(crate) fn service(namespace: &str, name: &str, address: &str, endpoints: &[&str]) -> Service {
        Service {
            name: name.into(),
            namespace: namespace.into(),
            hostname: format!("{name}.{namespace}.svc.cluster.local").into(),
            addresses: vec![address.parse().unwrap()],
            ports: vec![ServicePort {
                port: 80,
                target: TargetPort::Number(8080),
            }],
            distribution: TrafficDistribution::Any,
            affinity: false,
            endpoints: endpoints
                .iter()
                .map(|uid| ServiceEndpoint::Workload((*uid).into()))
                .collect(),
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn everything_is_found_by_its_keys() {
        let mut parts = parts();
        parts.workloads.push(workload("shop", "cart", "::ffff:10.0.0.1"));
        parts
            .services
            .push(service("shop", "cart", "10.96.0.1", &["shop/cart"]));
        let mesh = Mesh::build(parts).unwrap();
        assert_eq!(&*mesh.workload_by_uid("shop/cart").unwrap().name, "cart");
        for address in ["10.0.0.1", "::ffff:10.0.0.1"] {
            assert_eq!(&*mesh.workload_by_addr(ip(address)).unwrap().uid, "shop/cart");
        }
        assert!(mesh.workload_by_addr(ip("10.0.0.2")).is_none());
        assert_eq!(&*mesh.service_by_addr(ip("10.96.0.1")).unwrap().name, "cart");
        assert!(mesh.service_by_name("shop/cart").is_some());
        assert_eq!(mesh.local_workloads("n1").count(), 1);
        assert_eq!(mesh.local_workloads("n2").count(), 0);
    }

    #[test]
    fn parts_that_contradict_are_refused_with_the_reason() {
        let refused = |change: &dyn Fn(&mut MeshParts)| {
            let mut parts = parts();
            parts.workloads.push(workload("shop", "cart", "10.0.0.1"));
            parts.services.push(service("shop", "cart", "10.96.0.1", &[]));
            change(&mut parts);
            Mesh::build(parts).unwrap_err()
        };
        assert_eq!(
            refused(&|p| p.workloads.push(workload("shop", "cart", "10.0.0.2"))),
            MeshError::DuplicateUid {
                uid: "shop/cart".into()
            }
        );
        assert_eq!(
            refused(&|p| p.workloads.push(workload("shop", "web", "::ffff:10.0.0.1"))),
            MeshError::DuplicateAddress {
                address: ip("10.0.0.1"),
                first: "shop/cart".into(),
                second: "shop/web".into()
            }
        );
        assert_eq!(
            refused(&|p| p.services.push(service("shop", "web", "10.96.0.1", &[]))),
            MeshError::DuplicateServiceAddress {
                address: ip("10.96.0.1"),
                first: "shop/cart".into(),
                second: "shop/web".into()
            }
        );
        assert_eq!(
            refused(&|p| p.services.push(service("shop", "cart", "10.96.0.2", &[]))),
            MeshError::DuplicateService {
                name: "shop/cart".into()
            }
        );
        assert_eq!(
            refused(&|p| {
                let again = p.services[0].ports[0].clone();
                p.services[0].ports.push(again);
            }),
            MeshError::DuplicateServicePort {
                service: "shop/cart".into(),
                port: 80
            }
        );
        assert!(matches!(
            refused(&|p| p.services[0].ports[0].port = 0),
            MeshError::PortZero { .. }
        ));
        for address in ["0.0.0.0", "127.0.0.1", "::1", "::", "224.0.0.1", "::ffff:127.0.0.1"] {
            assert!(matches!(
                refused(&|p| p.workloads[0].addresses = vec![ip(address)]),
                MeshError::ImpossibleAddress { .. }
            ));
        }
        for name in ["", "a", "/a", "a/", "a/b/c"] {
            assert_eq!(
                refused(&|p| p.workloads[0].policies = vec![name.into()]),
                MeshError::ListedPolicyName {
                    workload: "shop/cart".into(),
                    policy: name.into()
                }
            );
        }
        let policy = |namespace, name, scope| Policy::new(namespace, name, scope, Action::Allow, Vec::new());
        for bad in [
            policy("", "a", Scope::Workload),
            policy("", "a", Scope::Namespace),
            policy("shop", "", Scope::Global),
            policy("shop", "a/b", Scope::Workload),
            policy("", "", Scope::Global),
        ] {
            assert!(matches!(
                refused(&|p| p.policies.push(bad.clone())),
                MeshError::PolicyName { .. }
            ));
        }
        assert_eq!(
            refused(&|p| p.policies = vec![policy("shop", "a", Scope::Workload), policy("shop", "a", Scope::Global)]),
            MeshError::DuplicatePolicy { key: "shop/a".into() }
        );
    }

    #[test]
    fn a_ready_workload_has_the_address_of_a_finished_one_in_either_order() {
        let mut finished = workload("shop", "job", "10.0.0.1");
        finished.ready = false;
        let live = workload("shop", "cart", "10.0.0.1");
        for order in [[finished.clone(), live.clone()], [live, finished]] {
            let mut parts = parts();
            parts.workloads.extend(order);
            let mesh = Mesh::build(parts).unwrap();
            assert_eq!(&*mesh.workload_by_addr(ip("10.0.0.1")).unwrap().uid, "shop/cart");
            assert!(mesh.workload_by_uid("shop/job").is_some());
        }
    }

    #[test]
    fn only_workloads_in_the_mesh_entitle_their_node_to_an_identity() {
        let mut parts = parts();
        let cart = workload("shop", "cart", "10.0.0.1");
        let mut plain = workload("shop", "plain", "10.0.0.2");
        plain.protocol = Protocol::Plain;
        let mut nowhere = workload("shop", "vm", "10.0.0.3");
        nowhere.node = "".into();
        let ids = [cart.identity.clone(), plain.identity.clone(), nowhere.identity.clone()];
        parts.workloads.extend([cart, plain, nowhere]);
        let mesh = Mesh::build(parts).unwrap();
        assert!(mesh.runs_on(&ids[0], "n1"));
        assert!(!mesh.runs_on(&ids[0], "n2"));
        assert!(!mesh.runs_on(&ids[1], "n1"));
        assert!(!mesh.runs_on(&ids[2], ""));
        let foreign = SpiffeId::parse("spiffe://other.domain/ns/shop/sa/cart").unwrap();
        assert!(!mesh.runs_on(&foreign, "n1"));
    }
}
