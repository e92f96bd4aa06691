//! What is found of the Kubernetes API, and of what this process may do there.

use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use tokio::time::timeout;

use super::finding::{Finding, Level};
use crate::cli::chain;

/// How long the API server may take to answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// A permission of the agent's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Permission {
    pub(super) group: &'static str,
    pub(super) resource: &'static str,
    pub(super) subresource: &'static str,
    pub(super) verb: &'static str,
    /// Whether the agent works without.
    pub(super) is_needed: bool,
}

const fn needed(group: &'static str, resource: &'static str, verb: &'static str) -> Permission {
    Permission {
        group,
        resource,
        subresource: "",
        verb,
        is_needed: true,
    }
}

const fn telling(
    group: &'static str,
    resource: &'static str,
    subresource: &'static str,
    verb: &'static str,
) -> Permission {
    Permission {
        group,
        resource,
        subresource,
        verb,
        is_needed: false,
    }
}

/// What the chart grants to agents.
pub(super) const PERMISSIONS: [Permission; 19] = [
    needed("", "namespaces", "list"),
    needed("", "namespaces", "watch"),
    needed("", "nodes", "list"),
    needed("", "nodes", "watch"),
    needed("", "pods", "list"),
    needed("", "pods", "watch"),
    needed("", "services", "list"),
    needed("", "services", "watch"),
    needed("discovery.k8s.io", "endpointslices", "list"),
    needed("discovery.k8s.io", "endpointslices", "watch"),
    needed("networking.k8s.io", "servicecidrs", "list"),
    needed("networking.k8s.io", "servicecidrs", "watch"),
    needed("security.istio.io", "authorizationpolicies", "list"),
    needed("security.istio.io", "authorizationpolicies", "watch"),
    needed("security.istio.io", "peerauthentications", "list"),
    needed("security.istio.io", "peerauthentications", "watch"),
    telling("", "pods", "status", "patch"),
    telling("events.k8s.io", "events", "", "create"),
    telling("events.k8s.io", "events", "", "patch"),
];

impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if !self.subresource.is_empty() {
            write!(f, "/{}", self.subresource)?;
        }
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        Ok(())
    }
}

/// What was asked of the API server.
#[derive(Debug)]
pub(super) struct ClusterFacts {
    /// Where it is, as far as it is known.
    pub(super) server: String,
    /// Whether a page of pods could be listed.
    pub(super) listed: Result<(), String>,
    /// What it says to each of [`PERMISSIONS`].
    pub(super) allowed: Vec<(Permission, Result<bool, String>)>,
}

/// Lists one pod, and asks for each permission.
pub(super) async fn ask(client: Client, server: String) -> ClusterFacts {
    let pods: Api<Pod> = Api::all(client.clone());
    let params = ListParams::default().limit(1);
    let listed = in_time(pods.list(&params)).await.map(drop);
    let allowed = if listed.is_err() && !is_answer(listed.as_ref().err()) {
        Vec::new()
    } else {
        join_all(PERMISSIONS.map(|permission| {
            let client = client.clone();
            async move { (permission, review(client, permission).await) }
        }))
        .await
    };
    ClusterFacts {
        server,
        listed,
        allowed,
    }
}

/// Whether the server has answered, if only to refuse.
fn is_answer(error: Option<&String>) -> bool {
    error.is_some_and(|error| error.contains("forbidden") || error.contains("Unauthorized"))
}

async fn in_time<T>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match timeout(DEADLINE, asked).await {
        Ok(answer) => answer.map_err(|error| chain(&error)),
        Err(_) => Err(format!("no answer within {} s", DEADLINE.as_secs())),
    }
}

async fn review(client: Client, permission: Permission) -> Result<bool, String> {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                group: text(permission.group),
                resource: text(permission.resource),
                subresource: text(permission.subresource),
                verb: text(permission.verb),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client);
    let params = PostParams::default();
    let answer = in_time(reviews.create(&params, &review)).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

/// Of the API server and of the permissions there; `Err` where there is no way to ask.
pub(super) fn cluster(facts: &Result<ClusterFacts, String>) -> Vec<Finding> {
    const NAME: &str = "Kubernetes API";
    let facts = match facts {
        Ok(facts) => facts,
        Err(error) => {
            let advice = "run it in a pod of the cluster, with the agent's service account, or give --kubeconfig";
            return vec![Finding::failed(NAME, error, advice)];
        }
    };
    let server = &facts.server;
    let api = match &facts.listed {
        Ok(()) => Finding::ok(NAME, format!("{server} answers")),
        Err(error) => Finding::failed(
            NAME,
            format!("listing pods at {server}: {error}"),
            "is the API server up and reached from this node, and is the service account's token good?",
        ),
    };
    if facts.allowed.is_empty() {
        return vec![api];
    }
    vec![api, permissions(&facts.allowed)]
}

fn permissions(allowed: &[(Permission, Result<bool, String>)]) -> Finding {
    const NAME: &str = "permissions";
    if let Some((permission, Err(error))) = allowed.iter().find(|(_, allowed)| allowed.is_err()) {
        let advice = "the API server answers who may do what to anybody whom it knows; its log says more";
        return Finding::warning(NAME, format!("asking whether we may {permission}: {error}"), advice);
    }
    let missing: Vec<_> = allowed.iter().filter(|(_, allowed)| *allowed == Ok(false)).collect();
    if missing.is_empty() {
        return Finding::ok(NAME, format!("all {} that the agent uses", allowed.len()));
    }
    let level = if missing.iter().any(|(permission, _)| permission.is_needed) {
        Level::Failed
    } else {
        Level::Warning
    };
    let names: Vec<_> = missing.iter().map(|(permission, _)| permission.to_string()).collect();
    let advice =
        "bind the ClusterRole adit-node of the chart to this service account; docs/rbac.md says what each is for";
    Finding::bad(level, NAME, format!("may not {}", names.join(", ")), advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(listed: Result<(), String>, denied: &[&str]) -> Result<ClusterFacts, String> {
        let allowed = PERMISSIONS.map(|permission| {
            let is_denied = denied.contains(&permission.to_string().as_str());
            (permission, Ok(!is_denied))
        });
        Ok(ClusterFacts {
            server: "https://api".to_owned(),
            listed,
            allowed: allowed.to_vec(),
        })
    }

    #[test]
    fn what_is_denied_is_named_and_fails_where_it_is_needed() {
        for (facts, levels, part) in [
            (facts(Ok(()), &[]), &[Level::Ok, Level::Ok][..], "all 19"),
            (
                facts(Ok(()), &["patch pods/status"]),
                &[Level::Ok, Level::Warning],
                "may not patch pods/status",
            ),
            (
                facts(Ok(()), &["create events.events.k8s.io", "watch nodes"]),
                &[Level::Ok, Level::Failed],
                "may not watch nodes, create events.events.k8s.io",
            ),
            (
                facts(Err("forbidden".to_owned()), &[]),
                &[Level::Failed, Level::Ok],
                "all",
            ),
            (Err("no kubeconfig".to_owned()), &[Level::Failed], "no kubeconfig"),
        ] {
            let found = cluster(&facts);
            assert_eq!(found.iter().map(|finding| finding.level).collect::<Vec<_>>(), levels);
            assert!(found.last().unwrap().what.contains(part), "{found:?}");
        }
    }

    /// The chart grants what is checked, and nothing else.
    #[test]
    fn the_chart_grants_what_is_asked_for() {
        const ROLE: &str = include_str!("../../../../deploy/chart/adit/templates/node-rbac.yaml");
        let list = |line: &str| -> Vec<String> {
            let inner = line.split_once('[').unwrap().1.split_once(']').unwrap().0;
            inner
                .split(',')
                .map(|item| item.trim().trim_matches('"').to_owned())
                .collect()
        };
        let (mut groups, mut resources, mut granted) = (Vec::new(), Vec::new(), Vec::new());
        for line in ROLE.lines().map(str::trim) {
            if line.starts_with("- apiGroups:") {
                groups = list(line);
            } else if line.starts_with("resources:") {
                resources = list(line);
            } else if line.starts_with("verbs:") {
                for (group, resource) in groups
                    .iter()
                    .flat_map(|group| resources.iter().map(move |r| (group, r)))
                {
                    granted.extend(list(line).into_iter().map(|verb| format!("{verb} {resource} {group}")));
                }
            }
        }
        let mut asked = PERMISSIONS.map(|permission| {
            let subresource = permission.subresource;
            let slash = if subresource.is_empty() { "" } else { "/" };
            format!(
                "{} {}{slash}{subresource} {}",
                permission.verb, permission.resource, permission.group
            )
        });
        asked.sort_unstable();
        granted.sort_unstable();
        assert_eq!(granted, asked);
    }
}
