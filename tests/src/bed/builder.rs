//! From the description of a bed to namespaces, links and cgroups.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once};

use anyhow::{Context, ensure};

use super::log::Log;
use super::mesh::{MeshDoc, NodeDoc, PortDoc, ServiceDoc};
use super::netns::{self, Namespaces};
use super::node::Node;
use super::pins::PinFolders;
use super::pod::{Pod, Sandbox};
use super::process::{CA_PORT, CaSettings, NodeSettings};
use super::spec::{Membership, PodSpec, ServiceSpec};
use super::sweep::{PREFIX, sweep};
use super::topology::{self, PodLink};
use super::{Bed, Ca, Service, TRUST_DOMAIN, cgroup};
use crate::sys::Place;

/// A bed to be.
#[derive(Debug, Clone)]
#[must_use]
pub struct BedBuilder {
    name: String,
    nodes: Vec<String>,
    pods: Vec<(String, PodSpec)>,
    services: Vec<ServiceSpec>,
    policies: Vec<String>,
    node_arguments: Vec<String>,
    certificate_lifetime: Option<u32>,
    kubelet: bool,
}

impl BedBuilder {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            nodes: Vec::new(),
            pods: Vec::new(),
            services: Vec::new(),
            policies: Vec::new(),
            node_arguments: Vec::new(),
            certificate_lifetime: None,
            kubelet: false,
        }
    }

    /// Adds a node.
    pub fn node(mut self, name: &str) -> Self {
        self.nodes.push(name.to_owned());
        self
    }

    /// Adds a pod on a node that was added before.
    pub fn pod(mut self, node: &str, pod: PodSpec) -> Self {
        self.pods.push((node.to_owned(), pod));
        self
    }

    /// Adds a service.
    pub fn service(mut self, service: ServiceSpec) -> Self {
        self.services.push(service);
        self
    }

    /// Adds an authorization policy: a YAML mapping as in the mesh file.
    pub fn policy(mut self, yaml: &str) -> Self {
        self.policies.push(yaml.to_owned());
        self
    }

    /// Adds an argument to the command line of every node's proxy.
    pub fn node_argument(mut self, argument: &str) -> Self {
        self.node_arguments.push(argument.to_owned());
        self
    }

    /// Tells every node's proxy where its kubelet is; see [`Node::as_kubelet`].
    pub fn kubelet(mut self) -> Self {
        self.kubelet = true;
        self
    }

    /// How many seconds the certificates of the CA hold.
    pub fn certificate_lifetime(mut self, seconds: u32) -> Self {
        self.certificate_lifetime = Some(seconds);
        self
    }

    /// Builds the bed and starts the CA and every node's proxy in it.
    pub fn start(self) -> anyhow::Result<Bed> {
        let bed = self.build()?;
        bed.start_all()?;
        Ok(bed)
    }

    /// Builds the bed; no program of Adit's runs yet.
    pub fn build(self) -> anyhow::Result<Bed> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        static SWEEP: Once = Once::new();
        SWEEP.call_once(sweep);
        let prefix = format!(
            "{}{}-{}",
            PREFIX,
            std::process::id(),
            COUNTER.fetch_add(1, Ordering::Relaxed)
        );
        self.lay_out(prefix).context("lay out the bed (root is needed)")
    }

    fn lay_out(self, prefix: String) -> anyhow::Result<Bed> {
        ensure!(!self.nodes.is_empty(), "a bed has at least one node");
        let plan = Plan::new(&self, &prefix)?;
        let namespaces = plan.create_network(&self)?;
        let cgroups = cgroup::Tree::create(&prefix)?;
        let pins = PinFolders::new(&prefix);
        let dir = tempfile::Builder::new()
            .prefix(&format!("{prefix}-"))
            .tempdir()
            .context("make a folder")?;
        let mesh_path = dir.path().join("mesh.yaml");

        let nodes = self.nodes.iter().enumerate().map(|(index, name)| {
            let cgroup = cgroups.add(format!("{name}/proxy"))?;
            let netns = plan.nodes[index].clone();
            let kubelet = cgroups.add(format!("{name}/kubelet"))?;
            let mut more = self.node_arguments.clone();
            if self.kubelet {
                more.extend(["--kubelet-cgroup".to_owned(), kubelet.display().to_string()]);
            }
            Ok(Node {
                settings: NodeSettings {
                    name: name.clone(),
                    mesh: mesh_path.clone(),
                    ca: plan.ca,
                    ca_root: dir.path().join("trust.pem"),
                    ca_token: dir.path().join(format!("{name}.token")),
                    pods_cgroup: cgroups.add(format!("{name}/pods"))?,
                    bpf_dir: pins.of(name),
                    run_dir: dir.path().join(format!("{name}-run")),
                    more,
                },
                place: Place::open(&netns::path(&netns), &cgroup)?,
                host: Place::open(&netns::path(&netns), &cgroups.add(format!("{name}/host"))?)?,
                netns,
                kubelet,
                v4: topology::node_v4(number(index)?),
                v6: topology::node_v6(number(index)?),
                process: Mutex::default(),
                leaving: Mutex::default(),
                log: Log::new(name, dir.path()),
            })
        });
        let nodes = nodes.collect::<anyhow::Result<Vec<Node>>>()?;
        let pods = self.pods.iter().zip(&plan.pods).map(|((node, spec), planned)| {
            let of_pod = format!("{node}/pods/{}", spec.cgroup.as_ref().unwrap_or(&spec.name));
            let cgroup = cgroups.add(&of_pod)?;
            let hosts = planned.first_host..planned.first_host + planned.hosts;
            // Those in the mesh are known by the mesh file.
            let sandbox = if spec.sandbox && spec.membership != Membership::Enrolled {
                let cgroup = cgroups.add(format!("{of_pod}/sandbox"))?;
                Some(Sandbox::start(&Place::open(&netns::path(&planned.netns), &cgroup)?)?)
            } else {
                None
            };
            Ok(Pod {
                spec: spec.clone(),
                node: node.clone(),
                place: Place::open(&netns::path(&planned.netns), &cgroup)?,
                netns: planned.netns.clone(),
                cgroup,
                v4: hosts.clone().map(|host| topology::pod_v4(planned.node, host)).collect(),
                v6: hosts
                    .filter(|_| spec.ipv6)
                    .map(|host| topology::pod_v6(planned.node, host))
                    .collect(),
                logs: dir.path().to_owned(),
                _sandbox: sandbox,
            })
        });
        let pods = pods.collect::<anyhow::Result<Vec<Pod>>>()?;
        let ca_place = cgroups.add(format!("{}/ca", self.nodes[0]))?;
        let bed = Bed {
            name: self.name.clone(),
            prefix,
            ca: Ca {
                process: Mutex::default(),
                settings: CaSettings {
                    dir: dir.path().join("ca"),
                    issuer_dir: dir.path().join("issuer"),
                    listen: plan.ca,
                    mesh: mesh_path.clone(),
                    names: vec![plan.ca.ip()],
                    lifetime: self.certificate_lifetime,
                },
                place: Place::open(&netns::path(&plan.nodes[0]), &ca_place)?,
                netns: netns::path(&plan.nodes[0]),
                log: Log::new("ca", dir.path()),
            },
            services: services(&self.services)?,
            mesh: Mutex::new(mesh_doc(&self, &nodes, &pods)?),
            mesh_path,
            nodes,
            pods,
            _pins: pins,
            _cgroups: cgroups,
            _namespaces: namespaces,
            dir: Some(dir),
        };
        bed.write_mesh_file()?;
        Ok(bed)
    }
}

/// The names and numbers of what will be made.
#[derive(Debug)]
struct Plan {
    nodes: Vec<String>,
    /// Joins the nodes where they are more than two.
    switch: Option<String>,
    pods: Vec<PlannedPod>,
    ca: SocketAddr,
}

#[derive(Debug)]
struct PlannedPod {
    netns: String,
    node: u8,
    first_host: u8,
    hosts: u8,
}

impl PlannedPod {
    fn link(&self) -> PodLink<'_> {
        PodLink {
            netns: &self.netns,
            first_host: self.first_host,
            hosts: self.hosts,
        }
    }
}

impl Plan {
    fn new(bed: &BedBuilder, prefix: &str) -> anyhow::Result<Self> {
        // Host 1 is the node.
        let mut next_host: BTreeMap<&str, u8> = bed.nodes.iter().map(|node| (node.as_str(), 2)).collect();
        let mut pods = Vec::with_capacity(bed.pods.len());
        for (node, spec) in &bed.pods {
            let next = next_host
                .get_mut(node.as_str())
                .with_context(|| format!("pod {}: no node {node}", spec.name))?;
            let hosts = 1 + spec.extra_addresses;
            let first_host = *next;
            *next = next
                .checked_add(hosts)
                .with_context(|| format!("too many pods on node {node}"))?;
            let index = bed.nodes.iter().position(|name| name == node).unwrap_or_default();
            pods.push(PlannedPod {
                netns: format!("{prefix}-pod-{}", spec.name),
                node: number(index)?,
                first_host,
                hosts,
            });
        }
        Ok(Self {
            nodes: bed.nodes.iter().map(|node| format!("{prefix}-{node}")).collect(),
            switch: (bed.nodes.len() > 2).then(|| format!("{prefix}-switch")),
            pods,
            ca: (topology::node_v4(1), CA_PORT).into(),
        })
    }

    fn create_network(&self, bed: &BedBuilder) -> anyhow::Result<Namespaces> {
        let mut names = self.nodes.clone();
        names.extend(self.switch.clone());
        names.extend(self.pods.iter().map(|pod| pod.netns.clone()));
        let specs = self.pods.iter().zip(&bed.pods);
        let own_users = specs
            .filter(|(_, (_, spec))| spec.own_users)
            .map(|(planned, _)| planned.netns.as_str());
        let namespaces = Namespaces::create(names, own_users, topology::SYSCTLS)?;
        for (planned, (_, spec)) in self.pods.iter().zip(&bed.pods) {
            if !spec.ipv6 {
                netns::inside(&netns::path(&planned.netns), || {
                    netns::set_sysctls(&[
                        ("net/ipv6/conf/all/disable_ipv6", "1"),
                        ("net/ipv6/conf/default/disable_ipv6", "1"),
                    ])
                })??;
            }
        }
        for (index, netns) in self.nodes.iter().enumerate() {
            let node = number(index)?;
            let links: Vec<PodLink<'_>> = self
                .pods
                .iter()
                .filter(|pod| pod.node == node)
                .map(PlannedPod::link)
                .collect();
            netns::inside(&netns::path(netns), || netns::set_sysctls(topology::NODE_SYSCTLS))??;
            netns::ip(
                Some(netns),
                &topology::node_script(node, &self.nodes, self.switch.as_deref(), &links),
            )?;
        }
        let nodes = number(self.nodes.len() - 1)?;
        if let Some(switch) = &self.switch {
            netns::ip(Some(switch), &topology::switch_script(nodes))?;
        }
        for (index, netns) in self.nodes.iter().enumerate() {
            netns::ip(Some(netns), &topology::routes_script(number(index)?, nodes))?;
        }
        for (planned, (_, spec)) in self.pods.iter().zip(&bed.pods) {
            netns::ip(
                Some(&planned.netns),
                &topology::pod_script(planned.node, &planned.link(), spec.ipv6),
            )?;
        }
        Ok(namespaces)
    }
}

fn number(index: usize) -> anyhow::Result<u8> {
    u8::try_from(index + 1)
        .ok()
        .filter(|number| *number < 255)
        .context("more than a bed can hold")
}

fn services(specs: &[ServiceSpec]) -> anyhow::Result<Vec<Service>> {
    let with_number = specs.iter().enumerate().map(|(index, spec)| {
        Ok(Service {
            name: format!("{}/{}", spec.namespace, spec.name),
            v4: topology::service_v4(number(index)?),
            v6: topology::service_v6(number(index)?),
        })
    });
    with_number.collect()
}

fn mesh_doc(bed: &BedBuilder, nodes: &[Node], pods: &[Pod]) -> anyhow::Result<MeshDoc> {
    let known = pods.iter().filter(|pod| pod.spec.membership != Membership::Unknown);
    let workloads = known.map(|pod| pod.entry(pod.spec.membership == Membership::Enrolled));
    let services = bed
        .services
        .iter()
        .zip(services(&bed.services)?)
        .map(|(spec, service)| ServiceDoc {
            name: spec.name.clone(),
            namespace: spec.namespace.clone(),
            addresses: vec![IpAddr::V4(service.v4), IpAddr::V6(service.v6)],
            ports: spec
                .ports
                .iter()
                .map(|(port, target)| PortDoc {
                    port: *port,
                    target: target.clone(),
                })
                .collect(),
            selector: (!spec.selector.is_empty()).then(|| spec.selector.clone()),
            endpoints: spec.selector.is_empty().then(|| spec.endpoints.clone()),
            distribution: spec.distribution.clone(),
        });
    Ok(MeshDoc {
        trust_domain: TRUST_DOMAIN.to_owned(),
        cluster_ranges: Vec::new(),
        unlisted_pods: None,
        nodes: nodes
            .iter()
            .map(|node| NodeDoc {
                name: node.name().to_owned(),
                addresses: vec![node.v4().into(), node.v6().into()],
            })
            .collect(),
        workloads: workloads.collect(),
        services: services.collect(),
        policies: bed.policies.clone(),
    })
}
