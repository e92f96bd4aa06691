//! `adit ca rotate`: asks for a step of a change of keys, and waits for it.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use kube::Client;

use super::args::duration;
use super::files::{FileError, Folder, PRIVATE};
use super::folder::{ANSWER_FILE, KeyFolder, REQUEST_FILE};
use super::keyring::{Answer, Standing, Step};
use super::rotation::{Answered, Asked, Desk};
use super::status::describe;
use crate::identity::TrustDomain;

const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Change the authority's keys, one step at a time.
///
/// A change of root is `publish`, then `sign`, then `retire`, each when the one before has reached everybody: a step that
/// comes too early is refused and says when it is due. `cancel` forgets a new root that does not sign yet. `renew` makes new
/// intermediates below the same root. `status` says where a change stands. Every step may be repeated; a command that was
/// interrupted has done nothing or all of it, and says so when it is given again.
///
/// The authority may run or not where its keys are in a folder. In a cluster the replica that leads does what is asked for;
/// the command needs to read and write one ConfigMap, and sees no key.
#[derive(Debug, Clone, Args)]
pub struct RotateArgs {
    /// The step.
    #[arg(value_enum)]
    pub what: What,
    /// Do it though others may not be ready: connections may fail. For emergencies.
    #[arg(long)]
    pub force: bool,
    /// Folder of the authority's keys, without a cluster.
    #[arg(long, env = "ADIT_CA_DIR", value_name = "DIR", default_value = "/var/lib/adit/ca")]
    pub dir: PathBuf,
    /// In a cluster: the authority's namespace.
    #[arg(long, env = "ADIT_CA_NAMESPACE", value_name = "NAME", default_value = "adit-system")]
    pub namespace: String,
    /// In a cluster: the ConfigMap in which changes are asked for.
    #[arg(
        long,
        env = "ADIT_CA_ROTATION_CONFIG_MAP",
        value_name = "NAME",
        default_value = "adit-ca-rotation"
    )]
    pub rotation_config_map: String,
    /// Without a cluster: the longest lifetime that the authority grants, which steps wait for.
    #[arg(long, env = "ADIT_CA_MAX_TTL", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub max_ttl: Duration,
    /// How long to wait for a running authority to do it.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub wait: Duration,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Make a new root and have everybody trust it beside the one that signs.
    Publish,
    /// Sign below the new root from now on.
    Sign,
    /// Trust the old root no longer, and forget its key.
    Retire,
    /// Forget a new root that does not sign yet.
    Cancel,
    /// Make new intermediates below the root that signs.
    Renew,
    /// Say where a change of roots stands.
    Status,
}

impl What {
    fn step(self) -> Option<Step> {
        Some(match self {
            Self::Publish => Step::Publish,
            Self::Sign => Step::Sign,
            Self::Retire => Step::Retire,
            Self::Cancel => Step::Cancel,
            Self::Renew => Step::Renew,
            Self::Status => return None,
        })
    }
}

/// `adit ca rotate`. `client` is that of the cluster, if the keys are in one.
pub async fn run_rotate(args: RotateArgs, client: Option<Client>, trust_domain: &TrustDomain) -> anyhow::Result<()> {
    let desk = client.map(|client| Desk::new(client, &args.namespace, &args.rotation_config_map));
    let Some(step) = args.what.step() else {
        let standing = match &desk {
            Some(desk) => desk
                .standing()
                .await?
                .context("no authority has said yet how its keys stand")?,
            None => standing_in_folder(&args)?,
        };
        return show(args.json, &standing, &describe(&standing));
    };
    let asked = Asked::new(step, args.force);
    let answer = match &desk {
        Some(desk) => {
            desk.ask(&asked).await?;
            wait(args.wait, async || Ok(desk.answer(&asked.id).await?)).await?
        }
        None => in_folder(&args, &asked, trust_domain).await?,
    };
    if !answer.done {
        bail!("{}", answer.message);
    }
    show(args.json, &answer, &answer.message)
}

fn show(json: bool, value: &impl serde::Serialize, text: &str) -> anyhow::Result<()> {
    let shown = if json {
        serde_json::to_string(value)?
    } else {
        text.to_owned()
    };
    Ok(writeln!(std::io::stdout(), "{shown}")?)
}

async fn wait(limit: Duration, answer: impl AsyncFn() -> anyhow::Result<Option<Answer>>) -> anyhow::Result<Answer> {
    let looks = async {
        loop {
            if let Some(answer) = answer().await? {
                return Ok(answer);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::time::timeout(limit, looks).await.unwrap_or_else(|_| {
        bail!("no authority has taken it up yet; it will as soon as one runs and leads: see `adit ca rotate status`")
    })
}

fn standing_in_folder(args: &RotateArgs) -> anyhow::Result<Standing> {
    let folder = KeyFolder::looked_at(&args.dir);
    let keyring = folder.load()?;
    Ok(keyring.context("there are no keys in the folder")?.standing())
}

/// Does it, or has the authority do it that holds the folder.
async fn in_folder(args: &RotateArgs, asked: &Asked, trust_domain: &TrustDomain) -> anyhow::Result<Answer> {
    match KeyFolder::open(&args.dir) {
        Ok(folder) => Ok(folder.take(asked, args.max_ttl, trust_domain, SystemTime::now())?.0),
        Err(FileError::InUse(_)) => {
            let folder = Folder::looked_at(&args.dir);
            folder.replace(REQUEST_FILE, &serde_json::to_vec(asked)?, PRIVATE)?;
            wait(args.wait, async || {
                let answered = folder.read_private(ANSWER_FILE)?;
                let answered: Option<Answered> = answered.and_then(|content| serde_json::from_slice(&content).ok());
                Ok(answered
                    .filter(|answered| answered.id == asked.id)
                    .map(|answered| answered.answer))
            })
            .await
        }
        Err(error) => Err(error.into()),
    }
}
