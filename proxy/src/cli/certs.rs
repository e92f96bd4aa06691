//! `adit certs`: the identities of this node and their certificates, the most urgent first.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::time::SystemTime;

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::ask;

/// `adit certs`.
#[derive(Debug, Clone, Args)]
pub struct CertsArgs {
    /// The admin page of the agent of this node
    #[arg(long, value_name = "ADDRESS", env = "ADIT_ADMIN", default_value = "127.0.0.1:15000")]
    admin: SocketAddr,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Why there is nothing to show.
#[derive(Debug, Error)]
#[error("asking the agent at {address}: {error}; does it run on this node, and is this its --admin?")]
pub struct CertsError {
    address: SocketAddr,
    error: io::Error,
}

/// An identity as the agent's state tells of it.
#[derive(Debug, Clone, Deserialize, Serialize)]
struct Certificate {
    identity: String,
    state: String,
    serial: Option<String>,
    issuer: Option<String>,
    root: Option<String>,
    not_before: Option<String>,
    not_after: Option<String>,
    next_refresh: Option<String>,
    last_error: Option<String>,
    /// Their number in the agent's state, their names in what is shown.
    #[serde(skip_deserializing)]
    pods: Vec<String>,
}

/// A pod as the agent's state tells of it.
#[derive(Debug, Deserialize)]
struct Pod {
    namespace: String,
    name: String,
    identity: Option<String>,
}

/// Asks the agent. What it says, for people or as JSON.
pub fn certs(args: &CertsArgs) -> Result<String, CertsError> {
    let failed = |error| CertsError {
        address: args.admin,
        error,
    };
    let certificates = ask::section(args.admin, "certificates").map_err(failed)?;
    let pods = ask::section(args.admin, "capture").map_err(failed)?;
    let now = SystemTime::now();
    let certificates = sorted(certificates, pods, now);
    if args.json {
        let text = serde_json::to_string_pretty(&certificates).map_err(io::Error::other);
        text.map_err(failed)
    } else {
        Ok(table(&certificates, now))
    }
}

/// With the names of their pods, the most urgent first: those that cannot be served, then by what is left.
fn sorted(mut certificates: Vec<Certificate>, pods: Vec<Pod>, now: SystemTime) -> Vec<Certificate> {
    for pod in pods {
        let of_pod = |one: &&mut Certificate| pod.identity.as_ref() == Some(&one.identity);
        if let Some(one) = certificates.iter_mut().find(of_pod) {
            one.pods.push(format!("{}/{}", pod.namespace, pod.name));
        }
    }
    certificates.iter_mut().for_each(|one| one.pods.sort());
    certificates.sort_by_cached_key(|one| {
        let rank = match one.state.as_str() {
            "unavailable" => 0,
            "failing" => 1,
            "pending" => 2,
            _ => 3,
        };
        let left = one.not_after.as_deref().and_then(|time| left(time, now));
        // Of those that have none, those that most pods wait for.
        (rank, left, Reverse(one.pods.len()), one.identity.clone())
    });
    certificates
}

fn table(certificates: &[Certificate], now: SystemTime) -> String {
    let mut rows = vec![
        [
            "IDENTITY", "STATE", "SERIAL", "AGE", "EXPIRES", "REFRESH", "ROOT", "PODS",
        ]
        .map(String::from),
    ];
    for one in certificates {
        let until = |time: &Option<String>| time.as_deref().map_or("-".into(), |time| in_words(time, now));
        let short = |text: &Option<String>| {
            text.as_deref()
                .map_or("-", |text| text.get(..8).unwrap_or(text))
                .to_owned()
        };
        rows.push([
            one.identity.clone(),
            one.state.clone(),
            short(&one.serial),
            until(&one.not_before),
            until(&one.not_after),
            until(&one.next_refresh),
            one.root.as_deref().map_or("-", common_name).to_owned(),
            one.pods.join(","),
        ]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..rows[0].len()).map(width).collect();
    let mut text = String::new();
    for (row, about) in rows
        .iter()
        .zip(std::iter::once(None).chain(certificates.iter().map(Some)))
    {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
        if let Some(error) = about.and_then(|one| one.last_error.as_deref()) {
            let _ = writeln!(text, "    {error}");
        }
    }
    if certificates.is_empty() {
        text.push_str("no pod of this node is in the mesh\n");
    }
    text.trim_end().to_owned()
}

/// What tells one from another in the names of authorities.
fn common_name(name: &str) -> &str {
    let common = name.split(", ").find_map(|part| part.strip_prefix("CN="));
    common.unwrap_or(name)
}

/// What is left until a time, negative once it has passed, in seconds.
fn left(time: &str, now: SystemTime) -> Option<i64> {
    let time = SystemTime::from(time.parse::<Timestamp>().ok()?);
    Some(match time.duration_since(now) {
        Ok(left) => i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        Err(passed) => -i64::try_from(passed.duration().as_secs()).unwrap_or(i64::MAX),
    })
}

/// `in 5h` or `5h ago`: two units at most.
fn in_words(time: &str, now: SystemTime) -> String {
    let Some(left) = left(time, now) else {
        return time.to_owned();
    };
    let seconds = left.unsigned_abs();
    let words = match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h{}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds / 3600 % 24),
    };
    if left < 0 {
        format!("{words} ago")
    } else {
        format!("in {words}")
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn certificate(name: &str, state: &str, not_after: Option<&str>) -> Certificate {
        Certificate {
            identity: name.into(),
            state: state.into(),
            serial: Some("0123456789abcdef".into()),
            issuer: None,
            root: None,
            not_before: Some("1970-01-01T00:00:00.000Z".into()),
            not_after: not_after.map(String::from),
            next_refresh: None,
            last_error: (state == "failing").then(|| "the CA is away".into()),
            pods: Vec::new(),
        }
    }

    fn pod(name: &str, identity: Option<&str>) -> Pod {
        Pod {
            namespace: "shop".into(),
            name: name.into(),
            identity: identity.map(String::from),
        }
    }

    #[test]
    fn the_most_urgent_come_first_with_the_names_of_their_pods() {
        let all = vec![
            certificate("valid-long", "valid", Some("1970-01-03T00:00:00.000Z")),
            certificate("valid-short", "valid", Some("1970-01-02T00:00:00.000Z")),
            certificate("pending", "pending", None),
            certificate("failing", "failing", Some("1970-01-01T02:00:00.000Z")),
            certificate("none", "unavailable", None),
            certificate("none-for-many", "unavailable", None),
        ];
        let pods = vec![
            pod("b", Some("none-for-many")),
            pod("a", Some("none-for-many")),
            pod("c", Some("pending")),
            pod("outside", None),
        ];
        let all = sorted(all, pods, at(3600));
        let order: Vec<_> = all.iter().map(|one| one.identity.as_str()).collect();
        let expected = [
            "none-for-many",
            "none",
            "failing",
            "pending",
            "valid-short",
            "valid-long",
        ];
        assert_eq!(order, expected);
        assert_eq!(all[0].pods, ["shop/a", "shop/b"]);
        let text = table(&all, at(3600));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 1 + all.len() + 1, "{text}");
        assert!(
            lines[1].ends_with("shop/a,shop/b") && lines[1].contains("01234567 "),
            "{text}"
        );
        assert!(lines[3].contains("60m ago") && lines[3].contains("in 60m"), "{text}");
        assert_eq!(lines[4], "    the CA is away");
    }

    #[test]
    fn what_the_agent_shows_can_be_read() {
        let shown = r#"[{"identity": "spiffe://a/ns/b/sa/c", "state": "valid", "serial": "ab", "pods": 2,
            "not_before": null, "not_after": null, "next_refresh": null, "last_error": null}]"#;
        let all: Vec<Certificate> = serde_json::from_str(shown).unwrap();
        assert_eq!(all[0].serial.as_deref(), Some("ab"));
        assert_eq!(
            table(&[], at(0)).lines().last(),
            Some("no pod of this node is in the mesh")
        );
    }

    #[test]
    fn a_root_is_told_by_its_common_name() {
        for (name, told) in [
            ("O=shop, CN=root 1", "root 1"),
            ("CN=a", "a"),
            ("O=only", "O=only"),
            ("", ""),
        ] {
            assert_eq!(common_name(name), told);
        }
    }

    #[test]
    fn times_are_told_in_two_units() {
        for (time, words) in [
            ("1970-01-02T00:00:00.000Z", "in 0s"),
            ("1970-01-02T00:01:59.000Z", "in 119s"),
            ("1970-01-01T22:00:01.000Z", "119m ago"),
            ("1970-01-02T07:30:00.000Z", "in 7h30m"),
            ("1970-01-12T05:00:00.000Z", "in 10d5h"),
            ("soon", "soon"),
        ] {
            assert_eq!(in_words(time, at(86_400)), words, "{time}");
        }
    }
}
