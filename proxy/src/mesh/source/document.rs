//! The YAML document of a mesh and how it becomes a [`Mesh`]. Its reference is `docs/mesh-file.md`.

mod exclude;
mod rules;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::IpNet;
use serde::Deserialize;
use serde_saphyr::{Location, Spanned};

use self::exclude::ExcludeSpec;
use self::rules::RuleSpec;
use super::fault::{Fault, Misplaced, Place};
use crate::identity::{SpiffeId, TrustDomain};
use crate::mesh::{
    Action, Mesh, MeshParts, Node, Policy, Protocol, SameNode, Scope, Service, ServiceEndpoint, ServicePort, Subject,
    TargetPort, TrafficDistribution, Unlisted, Workload,
};

const DEFAULT_CLUSTER_DOMAIN: &str = "cluster.local";
/// Far more than the schema needs, and far less than the stack bears.
const MAX_DEPTH: usize = 32;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    trust_domain: Spanned<String>,
    #[serde(default)]
    cluster_domain: Option<Spanned<String>>,
    #[serde(default)]
    cluster_ranges: Vec<Spanned<String>>,
    #[serde(default)]
    same_node: SameNode,
    #[serde(default)]
    unlisted_pods: Unlisted,
    #[serde(default)]
    nodes: Vec<Spanned<NodeSpec>>,
    #[serde(default)]
    workloads: Vec<Spanned<WorkloadSpec>>,
    #[serde(default)]
    services: Vec<Spanned<ServiceSpec>>,
    #[serde(default)]
    policies: Vec<Spanned<PolicySpec>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NodeSpec {
    name: Spanned<String>,
    #[serde(default)]
    zone: Option<Spanned<String>>,
    #[serde(default)]
    addresses: Vec<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WorkloadSpec {
    name: Spanned<String>,
    namespace: Spanned<String>,
    service_account: Spanned<String>,
    #[serde(default)]
    uid: Option<Spanned<String>>,
    #[serde(default)]
    node: Option<Spanned<String>>,
    #[serde(default)]
    addresses: Vec<Spanned<String>>,
    #[serde(default)]
    ports: BTreeMap<String, Spanned<String>>,
    #[serde(default = "hbone")]
    protocol: Protocol,
    #[serde(default)]
    same_node: Option<SameNode>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    policies: Vec<String>,
    #[serde(default = "yes")]
    ready: bool,
    #[serde(default)]
    exclude: Option<ExcludeSpec>,
    #[serde(default)]
    netns: Option<Spanned<PathBuf>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ServiceSpec {
    name: Spanned<String>,
    namespace: Spanned<String>,
    #[serde(default)]
    addresses: Vec<Spanned<String>>,
    ports: Vec<PortSpec>,
    #[serde(default)]
    selector: Option<Spanned<BTreeMap<String, String>>>,
    #[serde(default)]
    endpoints: Option<Vec<Spanned<String>>>,
    #[serde(default)]
    distribution: TrafficDistribution,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PortSpec {
    port: Spanned<String>,
    #[serde(default)]
    target: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PolicySpec {
    name: Spanned<String>,
    #[serde(default)]
    namespace: Option<Spanned<String>>,
    scope: ScopeSpec,
    #[serde(default)]
    selector: Option<Spanned<BTreeMap<String, String>>>,
    action: ActionSpec,
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    rules: Vec<RuleSpec>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ScopeSpec {
    Global,
    Namespace,
    Workload,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ActionSpec {
    Allow,
    Deny,
}

fn hbone() -> Protocol {
    Protocol::Hbone
}

fn yes() -> bool {
    true
}

/// Reads the text of a mesh file.
pub(super) fn parse(bytes: &[u8]) -> Result<Mesh, Misplaced> {
    let text = std::str::from_utf8(bytes).map_err(|error| not_utf8(bytes, error.valid_up_to()))?;
    let document: Document = serde_saphyr::from_str_with_options(text, options())?;
    let mut builder = Builder::new(&document)?;
    builder.add_nodes(document.nodes)?;
    builder.add_workloads(document.workloads)?;
    builder.add_services(document.services)?;
    builder.add_policies(document.policies)?;
    let Builder { parts, places, .. } = builder;
    Mesh::build(parts).map_err(|error| {
        let location = places.get(&error.subject()).copied().unwrap_or(Location::UNKNOWN);
        Fault::Mesh(error).at(location)
    })
}

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        // The file's size is limited; these only have to let a file of that size through.
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
            max_events: 64_000_000,
            max_nodes: 32_000_000,
        },
        emit_comments: false,
        strict_booleans: true,
        with_snippet: false,
    }
}

fn not_utf8(bytes: &[u8], valid: usize) -> Misplaced {
    let before = &bytes[..valid];
    let line_start = before
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |newline| newline + 1);
    Misplaced {
        place: Place {
            line: 1 + before.iter().filter(|byte| **byte == b'\n').count() as u64,
            column: 1 + String::from_utf8_lossy(&before[line_start..]).chars().count() as u64,
        },
        fault: Fault::Encoding,
    }
}

struct Builder {
    parts: MeshParts,
    /// What holds of workloads that do not say it themselves.
    same_node: SameNode,
    /// Where each part begins; of two with one name, the later.
    places: HashMap<Subject, Location>,
    zones: HashMap<Arc<str>, Arc<str>>,
    /// The workloads of each namespace, by index.
    by_namespace: HashMap<Arc<str>, Vec<usize>>,
    /// Equal strings, kept once.
    strings: HashSet<Arc<str>>,
}

impl Builder {
    fn new(document: &Document) -> Result<Self, Misplaced> {
        let trust_domain = &document.trust_domain;
        let trust_domain = TrustDomain::parse(&trust_domain.value)
            .map_err(|error| Fault::TrustDomain(error).at(trust_domain.referenced))?;
        let cluster_domain = match &document.cluster_domain {
            Some(domain) => name(domain)?,
            None => DEFAULT_CLUSTER_DOMAIN,
        };
        let mut parts = MeshParts::new(trust_domain, cluster_domain);
        parts.unlisted = document.unlisted_pods;
        parts.cluster_ranges = document.cluster_ranges.iter().map(block).collect::<Result<_, _>>()?;
        Ok(Self {
            parts,
            same_node: document.same_node,
            places: HashMap::new(),
            zones: HashMap::new(),
            by_namespace: HashMap::new(),
            strings: HashSet::new(),
        })
    }

    fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.strings.get(text) {
            return Arc::clone(known);
        }
        let shared: Arc<str> = text.into();
        self.strings.insert(Arc::clone(&shared));
        shared
    }

    fn add_nodes(&mut self, nodes: Vec<Spanned<NodeSpec>>) -> Result<(), Misplaced> {
        for Spanned {
            value: spec,
            referenced,
            ..
        } in nodes
        {
            let zone = self.share(spec.zone.as_ref().map_or(Ok(""), name)?);
            let name = self.share(name(&spec.name)?);
            self.places.insert(Subject::Node(Arc::clone(&name)), referenced);
            self.zones.insert(Arc::clone(&name), Arc::clone(&zone));
            self.parts.nodes.push(Node {
                name,
                zone,
                addresses: addresses(&spec.addresses)?,
                ranges: Vec::new(),
            });
        }
        Ok(())
    }

    fn add_workloads(&mut self, workloads: Vec<Spanned<WorkloadSpec>>) -> Result<(), Misplaced> {
        for Spanned {
            value: spec,
            referenced,
            ..
        } in workloads
        {
            let (workload_name, namespace) = (name(&spec.name)?, self.share(name(&spec.namespace)?));
            let identity = SpiffeId::new(&self.parts.trust_domain, &namespace, &spec.service_account.value)
                .map_err(|error| Fault::Identity(error).at(spec.service_account.referenced))?;
            let uid: Arc<str> = match &spec.uid {
                Some(uid) => self::uid(uid)?.into(),
                None => format!("{namespace}/{workload_name}").into(),
            };
            let (node, zone) = match &spec.node {
                None => (self.share(""), self.share("")),
                Some(node) => self.place_on_node(node)?,
            };
            if let Some(netns) = spec.netns.as_ref().filter(|netns| !netns.value.is_absolute()) {
                return Err(Fault::NetnsPath(netns.value.clone()).at(netns.referenced));
            }
            let ports = spec.ports.into_iter().map(named_port).collect::<Result<_, _>>()?;
            self.places.insert(Subject::Workload(Arc::clone(&uid)), referenced);
            self.by_namespace
                .entry(Arc::clone(&namespace))
                .or_default()
                .push(self.parts.workloads.len());
            let exclusions = spec.exclude.map(ExcludeSpec::into_exclusions).transpose()?;
            let policies = spec.policies.iter().map(|policy| self.share(policy)).collect();
            self.parts.workloads.push(Workload {
                uid,
                name: workload_name.into(),
                namespace,
                identity,
                node,
                addresses: addresses(&spec.addresses)?,
                ports,
                protocol: spec.protocol,
                same_node: spec.same_node.unwrap_or(self.same_node),
                labels: spec.labels,
                zone,
                policies,
                ready: spec.ready,
                exclusions: exclusions.flatten(),
                netns: spec.netns.map(|netns| netns.value),
                pod: None,
            });
        }
        Ok(())
    }

    /// The node's name and zone.
    fn place_on_node(&mut self, node: &Spanned<String>) -> Result<(Arc<str>, Arc<str>), Misplaced> {
        let node_name = name(node)?;
        match self.zones.get_key_value(node_name) {
            Some((node_name, zone)) => Ok((Arc::clone(node_name), Arc::clone(zone))),
            None if self.zones.is_empty() => Ok((self.share(node_name), self.share(""))),
            None => Err(Fault::UnknownNode(node_name.to_owned()).at(node.referenced)),
        }
    }

    fn add_services(&mut self, services: Vec<Spanned<ServiceSpec>>) -> Result<(), Misplaced> {
        let mut by_name = ByName::new();
        for workload in &self.parts.workloads {
            let key = format!("{}/{}", workload.namespace, workload.name);
            by_name.entry(key).or_default().push(Arc::clone(&workload.uid));
        }
        for Spanned {
            value: spec,
            referenced,
            ..
        } in services
        {
            let (service_name, namespace) = (self.share(name(&spec.name)?), self.share(name(&spec.namespace)?));
            let endpoints: Vec<Arc<str>> = match (&spec.selector, &spec.endpoints) {
                (Some(selector), None) => self
                    .selected(&namespace, selector)?
                    .into_iter()
                    .map(|index| Arc::clone(&self.parts.workloads[index].uid))
                    .collect(),
                (None, Some(listed)) => named_endpoints(&by_name, &namespace, listed)?,
                _ => return Err(Fault::Endpoints.at(referenced)),
            };
            let place = Subject::Service(format!("{namespace}/{service_name}").into());
            self.places.insert(place, referenced);
            let hostname = format!("{service_name}.{namespace}.svc.{}", self.parts.cluster_domain).into();
            self.parts.services.push(Service {
                name: service_name,
                namespace,
                hostname,
                addresses: addresses(&spec.addresses)?,
                ports: spec.ports.iter().map(service_port).collect::<Result<_, _>>()?,
                distribution: spec.distribution,
                affinity: false,
                endpoints: endpoints.into_iter().map(ServiceEndpoint::Workload).collect(),
            });
        }
        Ok(())
    }

    /// The workloads of the namespace that have all the labels, by index.
    fn selected(&self, namespace: &str, selector: &Spanned<BTreeMap<String, String>>) -> Result<Vec<usize>, Misplaced> {
        if selector.value.is_empty() {
            return Err(Fault::EmptySelector.at(selector.referenced));
        }
        let has_all = |index: &usize| {
            let labels = &self.parts.workloads[*index].labels;
            selector
                .value
                .iter()
                .all(|(label, value)| labels.get(label) == Some(value))
        };
        let candidates = self.by_namespace.get(namespace).map_or(&[][..], Vec::as_slice);
        Ok(candidates.iter().copied().filter(has_all).collect())
    }

    fn add_policies(&mut self, policies: Vec<Spanned<PolicySpec>>) -> Result<(), Misplaced> {
        for Spanned {
            value: spec,
            referenced,
            ..
        } in policies
        {
            let (scope, action) = (spec.scope.into(), spec.action.into());
            let policy_name = name(&spec.name)?;
            let namespace = spec.namespace.as_ref().map_or(Ok(""), name)?;
            let rules = spec
                .rules
                .into_iter()
                .map(|rule| rule.into_rule(namespace))
                .collect::<Result<_, _>>()?;
            let mut policy = Policy::new(namespace, policy_name, scope, action, rules);
            policy.dry_run = spec.dry_run;
            if let Some(selector) = &spec.selector {
                if scope != Scope::Workload {
                    return Err(Fault::Selector.at(selector.referenced));
                }
                for index in self.selected(namespace, selector)? {
                    self.parts.workloads[index].policies.push(Arc::clone(policy.key()));
                }
            }
            self.places
                .insert(Subject::Policy(Arc::clone(policy.key())), referenced);
            self.parts.policies.push(policy);
        }
        Ok(())
    }
}

impl From<ScopeSpec> for Scope {
    fn from(spec: ScopeSpec) -> Self {
        match spec {
            ScopeSpec::Global => Self::Global,
            ScopeSpec::Namespace => Self::Namespace,
            ScopeSpec::Workload => Self::Workload,
        }
    }
}

impl From<ActionSpec> for Action {
    fn from(spec: ActionSpec) -> Self {
        match spec {
            ActionSpec::Allow => Self::Allow,
            ActionSpec::Deny => Self::Deny,
        }
    }
}

fn name(text: &Spanned<String>) -> Result<&str, Misplaced> {
    let ok = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    match text.value.as_str() {
        value if (1..=253).contains(&value.len()) && value.bytes().all(ok) => Ok(value),
        value => Err(Fault::Name(value.to_owned()).at(text.referenced)),
    }
}

fn uid(text: &Spanned<String>) -> Result<&str, Misplaced> {
    let ok = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b'/' | b':');
    match text.value.as_str() {
        value if (1..=512).contains(&value.len()) && value.bytes().all(ok) => Ok(value),
        value => Err(Fault::Uid(value.to_owned()).at(text.referenced)),
    }
}

fn addresses(texts: &[Spanned<String>]) -> Result<Vec<IpAddr>, Misplaced> {
    let parse = |text: &Spanned<String>| {
        let parsed = text.value.parse();
        parsed.map_err(|_| Fault::Address(text.value.clone()).at(text.referenced))
    };
    texts.iter().map(parse).collect()
}

fn block(text: &Spanned<String>) -> Result<IpNet, Misplaced> {
    let parsed = text.value.parse();
    parsed.map_err(|_| Fault::Range(text.value.clone()).at(text.referenced))
}

/// The uids of the workloads of each `namespace/name`.
type ByName = HashMap<String, Vec<Arc<str>>>;

fn named_endpoints(
    by_name: &ByName,
    own_namespace: &str,
    listed: &[Spanned<String>],
) -> Result<Vec<Arc<str>>, Misplaced> {
    let mut uids = Vec::with_capacity(listed.len());
    for endpoint in listed {
        let found = match endpoint.value.contains('/') {
            true => by_name.get(&endpoint.value),
            false => by_name.get(&format!("{own_namespace}/{}", endpoint.value)),
        };
        let missing = || Fault::UnknownWorkload(endpoint.value.clone()).at(endpoint.referenced);
        uids.extend_from_slice(found.ok_or_else(missing)?);
    }
    Ok(uids)
}

fn service_port(spec: &PortSpec) -> Result<ServicePort, Misplaced> {
    let port = port_number(&spec.port)?;
    let target = match &spec.target {
        None => TargetPort::Number(port),
        Some(text) if is_port_name(&text.value) => TargetPort::Name(text.value.clone()),
        Some(text) => TargetPort::Number(port_number(text)?),
    };
    Ok(ServicePort { port, target })
}

fn named_port((name, port): (String, Spanned<String>)) -> Result<(String, u16), Misplaced> {
    match is_port_name(&name) {
        true => Ok((name, port_number(&port)?)),
        false => Err(Fault::Port(name).at(port.referenced)),
    }
}

fn port_number(text: &Spanned<String>) -> Result<u16, Misplaced> {
    match text.value.parse() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(Fault::Port(text.value.clone()).at(text.referenced)),
    }
}

/// As Kubernetes names ports, only of any case and length: there is a letter, so that it is not taken for a number.
fn is_port_name(text: &str) -> bool {
    let ok = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    text.bytes().all(ok) && text.bytes().any(|byte| byte.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests;
