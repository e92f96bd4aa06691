//! Keeping the node's pods enrolled, as the mesh says, as long as this process is in charge.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::handover::Wish;
use crate::admin::{Pending, Readiness};
use crate::mesh::MeshHandle;
use crate::node::{self, EnrolError, Enrolment};
use crate::telemetry::Telemetry;

/// How often telemetry is told what is gone, where the mesh does not change.
const FORGET_EVERY: Duration = Duration::from_secs(120);
/// How often it is looked whether programs and pins are in place.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Who keeps the pods enrolled.
pub(super) struct Keeper {
    /// None only while it is at work on another thread.
    enrolment: Option<Enrolment>,
    retry: bool,
    mesh: MeshHandle,
    telemetry: Arc<Telemetry>,
    readiness: Readiness,
    /// What is wrong and could not be put right.
    broken: Option<(String, Pending)>,
}

impl Keeper {
    pub(super) fn new(enrolment: Enrolment, mesh: MeshHandle, telemetry: Arc<Telemetry>, readiness: Readiness) -> Self {
        Self {
            enrolment: Some(enrolment),
            retry: false,
            mesh,
            telemetry,
            readiness,
            broken: None,
        }
    }

    /// Enrols what the mesh says.
    pub(super) async fn reconcile(&mut self) -> anyhow::Result<()> {
        let (mesh, telemetry) = (self.mesh.load(), Arc::clone(&self.telemetry));
        let work = move |enrolment: &mut Enrolment| {
            let retry = enrolment.reconcile(&mesh);
            telemetry.forget_missing(mesh.workloads(), Instant::now());
            retry
        };
        self.retry = self.aside(work).await?;
        Ok(())
    }

    /// Follows the mesh and looks after programs and pins, until a successor is in charge, which waits for a word.
    /// Cancelling loses the enrolment: for the end of the process only.
    pub(super) async fn keep(&mut self, wishes: &mut mpsc::Receiver<Wish>) -> anyhow::Result<oneshot::Sender<()>> {
        let mut generations = self.mesh.subscribe();
        let (mut forget, mut check) = (interval(FORGET_EVERY), interval(CHECK_EVERY));
        forget.set_missed_tick_behavior(MissedTickBehavior::Delay);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut frozen = false;
        loop {
            tokio::select! {
                Some(wish) = wishes.recv() => match wish {
                    Wish::Freeze(done) => {
                        frozen = true;
                        // One that has gone in the meantime thaws.
                        let _ = done.send(());
                    }
                    Wish::Thaw => {
                        tracing::warn!("a successor has failed; this process stays in charge");
                        frozen = false;
                        let reclaimed = self.aside(|enrolment| enrolment.reclaim()).await?;
                        self.note(reclaimed.map(|()| Vec::new()));
                    }
                    Wish::Drain(done) => return Ok(done),
                },
                changed = generations.changed(), if !frozen => {
                    changed.context("the mesh's source has ended")?;
                    self.reconcile().await?;
                }
                () = sleep(node::RETRY), if self.retry && !frozen => self.reconcile().await?,
                _ = forget.tick(), if !frozen => self.reconcile().await?,
                _ = check.tick(), if !frozen => {
                    let checked = self.aside(|enrolment| enrolment.check()).await?;
                    self.note(checked);
                }
            }
        }
    }

    /// Ends what is open of pods that leave, for good: for a process that is in charge no more.
    pub(super) async fn end_departed(&mut self) {
        let mut generations = self.mesh.subscribe();
        while generations.changed().await.is_ok() {
            let mesh = self.mesh.load();
            if let Err(error) = self.aside(move |enrolment| enrolment.end_departed(&mesh)).await {
                tracing::error!("{error:#}");
                break;
            }
        }
        std::future::pending().await
    }

    /// Logs what a check has found; what it could not put right makes this process not ready.
    fn note(&mut self, checked: Result<Vec<String>, EnrolError>) {
        match checked {
            Ok(repaired) => {
                for what in repaired {
                    tracing::warn!("put right: {what}");
                }
                if self.broken.take().is_some() {
                    tracing::info!("programs and pins are in place again");
                }
            }
            Err(error) => {
                let text = error.to_string();
                if self.broken.as_ref().is_none_or(|(known, _)| *known != text) {
                    tracing::error!("programs and pins are not in place: {text}");
                    let pending = self.readiness.pending(format!("programs and pins: {text}"));
                    self.broken = Some((text, pending));
                }
            }
        }
    }

    /// Works on a thread where that may take its time.
    async fn aside<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Enrolment) -> T + Send + 'static,
    ) -> anyhow::Result<T> {
        let mut enrolment = self.enrolment.take().context("the enrolment was lost")?;
        let (enrolment, result) = spawn_blocking(move || {
            let result = work(&mut enrolment);
            (enrolment, result)
        })
        .await?;
        self.enrolment = Some(enrolment);
        Ok(result)
    }
}
