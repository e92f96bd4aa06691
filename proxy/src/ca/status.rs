//! How the authority is doing: told on its health page, and shown by `adit ca status`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::authority::Authority;
use super::counts::Counts;
use super::keyring::{Phase, Standing, Step, date, fingerprint, seconds};
use super::leader::Leadership;
use super::rotation::Watched;
use super::signer;
use super::spiffe_bundle::bundle;
use crate::admin;

const DEADLINE: Duration = Duration::from_secs(5);

/// Show how a running authority is doing: its roots, which of them signs, a change of roots that is under way, who may make
/// changes, and how many certificates it has granted and refused.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// Where the authority serves its health page, as `adit ca --health` says.
    #[arg(
        long,
        env = "ADIT_CA_STATUS_ADDRESS",
        value_name = "ADDRESS",
        default_value = "127.0.0.1:15021"
    )]
    pub address: SocketAddr,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// What is told.
#[derive(Debug, Serialize, Deserialize)]
struct Status {
    trust_domain: String,
    /// SHA-256 of each root, the beginning.
    roots: Vec<String>,
    /// The certificate that signs.
    signer: String,
    signer_expires: u64,
    /// The authority's own roots; none where it signs by a key that was provided.
    keys: Option<Standing>,
    /// None where there are no replicas.
    leader: Option<Leader>,
    granted: u64,
    refused: BTreeMap<String, u64>,
    audit_lines_lost: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Leader {
    holder: String,
    /// Whether it is the one that was asked.
    here: bool,
    transitions: i32,
}

/// What there is to tell, as soon as the authority is open.
#[derive(Clone)]
pub(super) struct Telling {
    counts: Counts,
    opened: Arc<OnceLock<Opened>>,
}

struct Opened {
    authority: Arc<Authority>,
    watched: Watched,
    leadership: Option<Leadership>,
}

impl Telling {
    pub(super) fn new(counts: Counts) -> Self {
        Self {
            counts,
            opened: Arc::default(),
        }
    }

    pub(super) fn opened(&self, authority: Arc<Authority>, watched: Watched, leadership: Option<Leadership>) {
        // Once only.
        let _ = self.opened.set(Opened {
            authority,
            watched,
            leadership,
        });
    }

    /// The status, JSON; none as long as the authority is not open.
    pub(super) fn status(&self) -> Option<String> {
        let opened = self.opened.get()?;
        let authority = &opened.authority;
        let roots = signer::certificates(authority.root_pem().as_bytes()).unwrap_or_default();
        let status = Status {
            trust_domain: authority.trust_domain().to_string(),
            roots: roots.iter().map(|(_, pem)| fingerprint(pem)).collect(),
            signer: fingerprint(&authority.signer_pem()),
            signer_expires: seconds(authority.signer_not_after()),
            keys: opened.watched.standing(),
            leader: opened.leadership.as_ref().map(|leadership| {
                let (holder, transitions) = leadership.holder();
                Leader {
                    holder,
                    here: leadership.is_mine(),
                    transitions,
                }
            }),
            granted: self.counts.granted(),
            refused: self.counts.refusals(),
            audit_lines_lost: self.counts.lost(),
        };
        serde_json::to_string(&status).ok()
    }

    /// The roots as SPIFFE's bundle endpoints serve them.
    pub(super) fn spiffe_bundle(&self) -> Option<String> {
        let authority = &self.opened.get()?.authority;
        Some(bundle(&authority.root_pem(), authority.revision()).to_string())
    }
}

/// `adit ca status`.
pub fn run_status(args: &StatusArgs) -> anyhow::Result<()> {
    let text = ask(args.address).with_context(|| {
        let address = args.address;
        format!("cannot ask the authority at {address}; does `adit ca` run there with --health, or is it --address?")
    })?;
    let shown = match args.json {
        true => format!("{text}\n"),
        false => serde_json::from_str::<Status>(&text)
            .context("the answer is no status")?
            .text(),
    };
    Ok(std::io::stdout().write_all(shown.as_bytes())?)
}

fn ask(address: SocketAddr) -> anyhow::Result<String> {
    match admin::ask(address, "/status", DEADLINE)? {
        (200, body) => Ok(body),
        (_, body) => bail!("{}", body.lines().next().unwrap_or("no answer")),
    }
}

impl Status {
    fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |what: &str, value: &str| {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{what:<14}{value}");
        };
        line("trust domain", &self.trust_domain);
        match &self.keys {
            Some(keys) => {
                for root in &keys.roots {
                    let signs = if root.signs { "signs" } else { "trusted" };
                    line(
                        "root",
                        &format!("{}  {signs:<8} until {}", root.fingerprint, date(root.not_after)),
                    );
                }
            }
            None => self
                .roots
                .iter()
                .for_each(|root| line("root", &format!("{root}  provided"))),
        }
        line(
            "signer",
            &format!("{}  until {}", self.signer, date(self.signer_expires)),
        );
        if let Some(keys) = &self.keys {
            line("phase", &describe(keys));
        }
        if let Some(leader) = &self.leader {
            let here = if leader.here { " (this one)" } else { "" };
            line(
                "leader",
                &format!("{}{here}, {} changes of leader", leader.holder, leader.transitions),
            );
        }
        line("granted", &self.granted.to_string());
        line("refused", &self.refused.values().sum::<u64>().to_string());
        for (reason, count) in &self.refused {
            line("", &format!("{count} {reason}"));
        }
        if self.audit_lines_lost > 0 {
            line(
                "audit",
                &format!("{} lines could not be written", self.audit_lines_lost),
            );
        }
        text
    }
}

/// Where a change of roots stands, for people.
pub(super) fn describe(keys: &Standing) -> String {
    let since = match keys.since {
        0 => String::new(),
        since => format!(" since {}", date(since)),
    };
    let what = match keys.phase {
        Phase::Steady => return format!("steady{since}: one root"),
        Phase::Published => "published: the new root is trusted, the old one signs",
        Phase::Signing => "signing: the new root signs, the old one is still trusted",
    };
    let next = match keys.next {
        Step::Sign => "sign",
        _ => "retire",
    };
    let when = keys
        .not_before
        .map_or_else(String::new, |at| format!(" from {} on", date(at)));
    format!("{what}{since}; next: {next}{when}")
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::super::keyring::Keyring;
    use super::*;
    use crate::identity::TrustDomain;

    #[test]
    fn the_status_tells_roots_phase_leader_and_refusals_and_no_keys() {
        let domain = TrustDomain::parse("cluster.local").unwrap();
        let mut keyring = Keyring::found(&domain, SystemTime::now()).unwrap();
        keyring.take(Step::Publish, false, &domain, SystemTime::now());
        let counts = Counts::default();
        let telling = Telling::new(counts.clone());
        assert!(telling.status().is_none());
        let authority = Arc::new(Authority::of_keyring("it", &keyring, &domain).unwrap());
        let watched = Watched::default();
        watched.set(&keyring);
        telling.opened(authority, watched, Some(Leadership::certain()));
        counts.issued(SystemTime::now());
        counts.refused("not_on_node");
        counts.refused("not_on_node");
        let json = telling.status().unwrap();
        let status: Status = serde_json::from_str(&json).unwrap();
        let text = status.text();
        for part in [
            "signs",
            "trusted",
            "published",
            "next: sign",
            "(this one)",
            "granted       1",
            "2 not_on_node",
        ] {
            assert!(text.contains(part), "{part}:\n{text}");
        }
        assert!(!json.contains("PRIVATE") && !text.contains("PRIVATE"));
        assert!(telling.spiffe_bundle().unwrap().contains("spiffe_sequence"));
    }
}
