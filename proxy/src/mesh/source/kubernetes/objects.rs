//! From the API's objects to what the mesh is made of: each object for itself, by pure functions.

use std::collections::BTreeMap;
use std::net::IpAddr;

use bytes::Bytes;
use ipnet::IpNet;
use prost::Message as _;

use super::error::DecodeError;
use super::settings::EnrolmentLabel;
use super::wire::{self, text};
use crate::mesh::{CAPTURED, Captured, Exclusions, PodDetails, Readiness, TrafficDistribution};

/// What Istio's agent writes where Adit's writes its condition.
const REDIRECTION: &str = "ambient.istio.io/redirection";
/// How many faults of a pod's annotations are told.
const MOST_FAULTS: usize = 8;
const STATIC_UID: &str = "kubernetes.io/config.hash";
const OWN_ANNOTATIONS: &str = "mesh.adit/";
const ZONE: &str = "topology.kubernetes.io/zone";
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The labels by which a peer is told in metrics and log.
const CANONICAL: [&str; 6] = [
    "service.istio.io/canonical-name",
    "app.kubernetes.io/name",
    "app",
    "service.istio.io/canonical-revision",
    "app.kubernetes.io/version",
    "version",
];

/// A namespace.
#[derive(Debug, PartialEq)]
pub(super) struct Namespace {
    pub(super) name: String,
    pub(super) uid: String,
    /// Whether its label wants its pods in the mesh; none where it says nothing.
    pub(super) mode: Option<bool>,
}

/// A node.
#[derive(Debug, PartialEq)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) zone: String,
    pub(super) addresses: Vec<IpAddr>,
    /// Where its pods' addresses lie.
    pub(super) pod_ranges: Vec<IpNet>,
}

/// A pod.
#[derive(Debug, PartialEq)]
pub(super) struct Pod {
    pub(super) uid: String,
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) service_account: String,
    pub(super) node: String,
    /// None for a pod of the host's network: they are its node's.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) labels: BTreeMap<String, String>,
    /// Whether its own label wants it in the mesh; none where it says nothing.
    pub(super) mode: Option<bool>,
    /// Whether its node's agent says that it is captured.
    pub(super) captured: bool,
    pub(super) ready: bool,
    pub(super) host_network: bool,
    pub(super) finished: bool,
    pub(super) deleting: bool,
    /// What its annotations exclude.
    pub(super) exclusions: Exclusions,
    /// When it was created, in seconds.
    pub(super) created: i64,
    /// Only for pods of the own node; `labelled` is not told yet.
    pub(super) details: Option<PodDetails>,
}

/// Where addresses of services lie.
#[derive(Debug, PartialEq)]
pub(super) struct ServiceRange {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) ranges: Vec<IpNet>,
}

/// A service with addresses of its own.
#[derive(Debug, PartialEq)]
pub(super) struct Service {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) uid: String,
    /// None where it is headless, or but a name for something outside.
    pub(super) addresses: Vec<IpAddr>,
    /// The TCP ports by name.
    pub(super) ports: Vec<(String, u16)>,
    pub(super) distribution: TrafficDistribution,
    pub(super) affinity: bool,
}

/// Some of a service's endpoints.
#[derive(Debug, PartialEq)]
pub(super) struct Slice {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) uid: String,
    pub(super) service: String,
    /// The TCP ports by name.
    pub(super) ports: Vec<(String, u16)>,
    pub(super) endpoints: Vec<Endpoint>,
}

/// An endpoint of a service.
#[derive(Debug, PartialEq)]
pub(super) struct Endpoint {
    pub(super) address: IpAddr,
    /// The uid of its pod, where it is one.
    pub(super) pod: Option<String>,
    pub(super) node: String,
    pub(super) zone: String,
    pub(super) readiness: Readiness,
}

/// Which of an object's texts are wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) label: &'a EnrolmentLabel,
    /// The node whose pods' details are wanted.
    pub(super) node: Option<&'a str>,
}

pub(super) fn namespace(bytes: Bytes, view: View<'_>) -> Result<Namespace, DecodeError> {
    let meta = wire::Namespace::decode(bytes)?.metadata.unwrap_or_default();
    Ok(Namespace {
        name: required(&meta.name, "name")?,
        uid: required(&meta.uid, "uid")?,
        mode: mode(&meta.labels, view.label)?,
    })
}

pub(super) fn node(bytes: Bytes) -> Result<Node, DecodeError> {
    let node = wire::Node::decode(bytes)?;
    let meta = node.metadata.unwrap_or_default();
    let (spec, status) = (node.spec.unwrap_or_default(), node.status.unwrap_or_default());
    let mut zone = String::new();
    entries(&meta.labels, |label, value| {
        if label == ZONE {
            zone = value.to_owned();
        }
    })?;
    let of_pods = if spec.pod_cidrs.is_empty() {
        vec![spec.pod_cidr]
    } else {
        spec.pod_cidrs
    };
    let is_own = |kind: &Bytes| matches!(&kind[..], b"InternalIP" | b"ExternalIP");
    let addresses = status.addresses.iter().filter(|address| is_own(&address.r#type));
    Ok(Node {
        name: required(&meta.name, "name")?,
        uid: required(&meta.uid, "uid")?,
        zone,
        addresses: addresses.filter_map(|address| ip(&address.address)).collect(),
        pod_ranges: ranges(&of_pods),
    })
}

pub(super) fn pod(bytes: Bytes, view: View<'_>) -> Result<Pod, DecodeError> {
    let pod = wire::Pod::decode(bytes)?;
    let meta = pod.metadata.unwrap_or_default();
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let node = text(&spec.node_name)?;
    let is_own = view.node == Some(node);
    let (host_network, finished) = (spec.host_network, matches!(&status.phase[..], b"Succeeded" | b"Failed"));
    let deleting = meta.deletion_timestamp.is_some();

    let condition = |name: &str| {
        status
            .conditions
            .iter()
            .find(|condition| condition.r#type == name.as_bytes())
    };
    let is_true = |condition: &wire::PodCondition| &condition.status[..] == b"True";
    let captured = condition(CAPTURED);
    let mut details = is_own.then(PodDetails::default);
    let (mut redirected, mut exclusions) = (false, Exclusions::default());
    entries(&meta.annotations, |key, value| {
        let fault = exclusions.annotated(key, value).err();
        redirected |= key == REDIRECTION && value == "enabled";
        if let Some(details) = &mut details {
            if key == STATIC_UID {
                details.static_uid = Some(value.into());
            } else if key.starts_with(OWN_ANNOTATIONS) {
                details.annotations.insert(key.to_owned(), value.to_owned());
                if details.faults.len() < MOST_FAULTS {
                    details.faults.extend(fault.map(|fault| fault.to_string()));
                }
            }
        }
    })?;
    if let Some(details) = &mut details {
        details.host_network = host_network;
        details.finished = finished;
        details.deleting = deleting;
        details.runtime_class = some(&spec.runtime_class_name)?.map(Into::into);
        if let Some(captured) = captured {
            details.captured = Some(Captured {
                status: is_true(captured),
                reason: text(&captured.reason)?.to_owned(),
                message: text(&captured.message)?.to_owned(),
            });
        }
    }
    let mut labels = BTreeMap::new();
    entries(&meta.labels, |key, value| {
        if is_own || CANONICAL.contains(&key) {
            labels.insert(key.to_owned(), value.to_owned());
        }
    })?;
    let mut addresses = Vec::new();
    if !host_network && !finished {
        addresses.extend(status.pod_ips.iter().filter_map(|entry| ip(&entry.ip)));
        if addresses.is_empty() {
            addresses.extend(ip(&status.pod_ip));
        }
        addresses.shrink_to_fit();
    }
    Ok(Pod {
        uid: required(&meta.uid, "uid")?,
        name: required(&meta.name, "name")?,
        namespace: required(&meta.namespace, "namespace")?,
        service_account: some(&spec.service_account_name)?.unwrap_or("default").to_owned(),
        node: node.to_owned(),
        addresses,
        labels,
        // Mirror pods have none, and nodes make those as they like, in any namespace and with any label: nobody's identity
        // may follow from them.
        mode: match spec.service_account_name.is_empty() {
            true => Some(false),
            false => mode(&meta.labels, view.label)?,
        },
        captured: captured.is_some_and(is_true) || redirected,
        ready: condition("Ready").is_some_and(is_true) && !deleting && !finished,
        host_network,
        finished,
        deleting,
        exclusions,
        created: meta.creation_timestamp.unwrap_or_default().seconds,
        details,
    })
}

pub(super) fn service_range(bytes: Bytes) -> Result<ServiceRange, DecodeError> {
    let object = wire::ServiceCidr::decode(bytes)?;
    let meta = object.metadata.unwrap_or_default();
    Ok(ServiceRange {
        name: required(&meta.name, "name")?,
        uid: required(&meta.uid, "uid")?,
        ranges: ranges(&object.spec.unwrap_or_default().cidrs),
    })
}

pub(super) fn service(bytes: Bytes) -> Result<Service, DecodeError> {
    let service = wire::Service::decode(bytes)?;
    let (meta, spec) = (service.metadata.unwrap_or_default(), service.spec.unwrap_or_default());
    let ips = if spec.cluster_ips.is_empty() {
        vec![spec.cluster_ip]
    } else {
        spec.cluster_ips
    };
    let is_name_only = &spec.r#type[..] == b"ExternalName";
    let addresses = ips.iter().filter(|_| !is_name_only).filter_map(ip);
    let mut ports = Vec::new();
    for port in spec.ports.iter().filter(|port| is_tcp(&port.protocol)) {
        let number = u16::try_from(port.port).ok().filter(|number| *number > 0);
        if let Some(number) = number {
            ports.push((text(&port.name)?.to_owned(), number));
        }
    }
    let distribution = match (&spec.internal_traffic_policy[..], &spec.traffic_distribution[..]) {
        (b"Local", _) => TrafficDistribution::SameNodeOnly,
        (_, b"PreferSameNode") => TrafficDistribution::PreferSameNode,
        (_, b"PreferSameZone" | b"PreferClose") => TrafficDistribution::PreferSameZone,
        _ => TrafficDistribution::Any,
    };
    Ok(Service {
        name: required(&meta.name, "name")?,
        namespace: required(&meta.namespace, "namespace")?,
        uid: required(&meta.uid, "uid")?,
        addresses: addresses.collect(),
        ports,
        distribution,
        affinity: &spec.session_affinity[..] == b"ClientIP",
    })
}

/// None where it is no service's, or its addresses are names.
pub(super) fn slice(bytes: Bytes) -> Result<Slice, DecodeError> {
    let slice = wire::EndpointSlice::decode(bytes)?;
    let meta = slice.metadata.unwrap_or_default();
    let mut service = String::new();
    entries(&meta.labels, |label, value| {
        if label == SERVICE_NAME {
            service = value.to_owned();
        }
    })?;
    let mut ports = Vec::new();
    for port in slice.ports.iter().filter(|port| is_tcp(&port.protocol)) {
        let number = port.port.and_then(|number| u16::try_from(number).ok());
        if let Some(number) = number.filter(|number| *number > 0) {
            ports.push((text(&port.name)?.to_owned(), number));
        }
    }
    let mut endpoints = Vec::with_capacity(slice.endpoints.len());
    if &slice.address_type[..] != b"FQDN" {
        for endpoint in &slice.endpoints {
            // Consumers are to take the first: they are all of one endpoint.
            let Some(address) = endpoint.addresses.first().and_then(ip) else {
                continue;
            };
            let target = endpoint.target_ref.as_ref().filter(|target| &target.kind[..] == b"Pod");
            endpoints.push(Endpoint {
                address,
                pod: target
                    .map(|target| required(&target.uid, "targetRef.uid"))
                    .transpose()?,
                node: text(&endpoint.node_name)?.to_owned(),
                zone: text(&endpoint.zone)?.to_owned(),
                readiness: readiness(endpoint.conditions.unwrap_or_default()),
            });
        }
    }
    Ok(Slice {
        name: required(&meta.name, "name")?,
        namespace: required(&meta.namespace, "namespace")?,
        uid: required(&meta.uid, "uid")?,
        service,
        ports,
        endpoints,
    })
}

/// What is not said of readiness is to be taken for ready, and of serving for what is said of readiness. That a service
/// publishes what is not ready has been taken account of.
fn readiness(conditions: wire::EndpointConditions) -> Readiness {
    let ready = conditions.ready.unwrap_or(true);
    match (ready, conditions.serving.unwrap_or(ready), conditions.terminating) {
        (true, _, _) => Readiness::Ready,
        (false, true, Some(true)) => Readiness::Draining,
        (false, _, _) => Readiness::NotReady,
    }
}

fn is_tcp(protocol: &Bytes) -> bool {
    matches!(&protocol[..], b"" | b"TCP")
}

/// What the label of enrolment says, where it is there.
fn mode(labels: &[Bytes], wanted: &EnrolmentLabel) -> Result<Option<bool>, DecodeError> {
    let mut mode = None;
    entries(labels, |label, value| {
        if label == wanted.key {
            mode = Some(value == wanted.value);
        }
    })?;
    Ok(mode)
}

fn entries(map: &[Bytes], mut each: impl FnMut(&str, &str)) -> Result<(), DecodeError> {
    for entry in map {
        let wire::Entry { key, value } = wire::Entry::decode(entry.clone())?;
        each(text(&key)?, text(&value)?);
    }
    Ok(())
}

fn some(bytes: &Bytes) -> Result<Option<&str>, DecodeError> {
    Ok(Some(text(bytes)?).filter(|text| !text.is_empty()))
}

fn required(bytes: &Bytes, what: &'static str) -> Result<String, DecodeError> {
    some(bytes)?.map(str::to_owned).ok_or(DecodeError::Lacks(what))
}

fn ranges(texts: &[Bytes]) -> Vec<IpNet> {
    texts
        .iter()
        .filter_map(|range| text(range).ok()?.parse().ok())
        .collect()
}

/// An address that something can be reached at.
fn ip(bytes: &Bytes) -> Option<IpAddr> {
    let ip: IpAddr = text(bytes).ok()?.parse().ok()?;
    let ip = ip.to_canonical();
    (!ip.is_unspecified() && !ip.is_loopback() && !ip.is_multicast()).then_some(ip)
}

/// Which object it is.
#[derive(Debug, PartialEq)]
pub(super) struct Named {
    /// Empty where it is in none.
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

pub(super) fn named(bytes: Bytes) -> Result<Named, DecodeError> {
    let meta = wire::Namespace::decode(bytes)?.metadata.unwrap_or_default();
    Ok(Named {
        namespace: text(&meta.namespace)?.to_owned(),
        name: required(&meta.name, "name")?,
        uid: required(&meta.uid, "uid")?,
    })
}

#[cfg(test)]
mod tests;
