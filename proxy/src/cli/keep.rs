//! Keeping the node's pods enrolled, as the mesh says, as long as this process is in charge.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::handover::Wish;
use crate::admin::{Pending, Readiness};
use crate::dataplane::{DirectConnections, Verdicts};
use crate::mesh::{Changes, Mesh, MeshHandle};
use crate::node::{EnrolError, Enrolment, LocalPods, PodStanding};
use crate::telemetry::Telemetry;

/// How often telemetry is told what is gone, and all is looked at, whether the mesh has changed or not.
const FORGET_EVERY: Duration = Duration::from_secs(120);
/// How often it is looked whether programs and pins are in place.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Who keeps the pods enrolled.
pub(super) struct Keeper {
    /// None only while it is at work on another thread.
    kept: Option<Kept>,
    /// When pods are to be looked at again, although nothing has changed.
    again: Option<Duration>,
    mesh: MeshHandle,
    readiness: Readiness,
    /// Woken when a pod that should be enrolled is there, and is not.
    born: Arc<Notify>,
    /// What is wrong and could not be put right.
    broken: Option<(String, Pending)>,
}

/// What is kept as the mesh says: enrolment and the kernel's verdicts.
pub(super) struct Kept {
    pub(super) enrolment: Enrolment,
    pub(super) verdicts: Verdicts,
    pub(super) direct: Arc<DirectConnections>,
    pub(super) pods: LocalPods,
    pub(super) telemetry: Arc<Telemetry>,
    /// Who is told how pods stand.
    pub(super) standings: watch::Sender<Arc<Vec<PodStanding>>>,
    /// The mesh as it was last taken account of.
    pub(super) seen: Option<Arc<Mesh>>,
}

impl Kept {
    /// Takes account of the mesh as a whole. Gives when some pod has to be looked at again.
    fn reconcile(&mut self, mesh: &Arc<Mesh>) -> Option<Duration> {
        let changes = self.seen.as_ref().map(|seen| mesh.changes_since(seen));
        self.reconcile_with(mesh, changes.as_ref())
    }

    /// The same where only pods of this node can have come, and the mesh has not changed.
    fn enrol(&mut self, mesh: &Mesh) -> Option<Duration> {
        let pods = self.pods.all();
        let again = self.enrolment.reconcile(mesh);
        if !Arc::ptr_eq(&pods, &self.pods.all()) {
            self.publish(mesh, None);
        }
        self.standings.send_replace(Arc::new(self.enrolment.standings(mesh)));
        again
    }

    /// Takes account of what has changed in the mesh. Gives when some pod has to be looked at again, where that may have
    /// come to differ.
    fn follow(&mut self, mesh: &Arc<Mesh>) -> Option<Option<Duration>> {
        let changes = self.seen.as_ref().map(|seen| mesh.changes_since(seen));
        match changes {
            // Nothing of it is about this node's pods: only where they may connect to has changed.
            Some(changes) if !changes.policies && !changes.touch_node(self.enrolment.node()) => {
                self.publish(mesh, Some(&changes));
                self.seen = Some(Arc::clone(mesh));
                None
            }
            changes => Some(self.reconcile_with(mesh, changes.as_ref())),
        }
    }

    fn reconcile_with(&mut self, mesh: &Arc<Mesh>, changes: Option<&Changes>) -> Option<Duration> {
        // What policies forbid by now first; then, where pods have come or gone, once more.
        self.publish(mesh, changes);
        self.enforce();
        let again = self.enrol(mesh);
        self.seen = Some(Arc::clone(mesh));
        again
    }

    fn publish(&mut self, mesh: &Mesh, changes: Option<&Changes>) {
        if let Err(error) = self.verdicts.publish(mesh, &self.pods, changes) {
            tracing::error!("{error}; connections that the kernel knows no verdict of take the proxy");
        }
    }

    /// Puts right what is not in its place.
    fn check(&mut self, mesh: &Mesh) -> Result<Vec<String>, EnrolError> {
        let checked = self.enrolment.check();
        if let Some(repaired) = checked.as_ref().ok().filter(|repaired| !repaired.is_empty()) {
            self.telemetry.put_right(repaired.len());
            // Pods of which something was gone are tested again.
            self.standings.send_replace(Arc::new(self.enrolment.standings(mesh)));
        }
        checked
    }

    fn forget(&self, mesh: &Mesh) {
        self.telemetry.forget_missing(mesh.workloads(), Instant::now());
    }

    fn enforce(&self) {
        match self.direct.enforce() {
            Ok(0) => {}
            Ok(count) => tracing::info!("ended {count} direct connections that policies forbid by now"),
            Err(error) => tracing::error!("{error}; open connections that policies forbid by now go on"),
        }
    }

    /// Takes back what a successor may have changed.
    fn reclaim(&mut self, mesh: &Arc<Mesh>) -> Result<(), EnrolError> {
        // It numbers identities otherwise: nothing of it may be left when the pods have their own numbers again.
        self.verdicts.reclaim()?;
        self.enrolment.reclaim()?;
        self.seen = None;
        self.reconcile(mesh);
        Ok(())
    }
}

impl Keeper {
    pub(super) fn new(kept: Kept, mesh: MeshHandle, readiness: Readiness, born: Arc<Notify>) -> Self {
        Self {
            kept: Some(kept),
            again: None,
            mesh,
            readiness,
            born,
            broken: None,
        }
    }

    /// Enrols what the mesh says, and tells the kernel its verdicts.
    pub(super) async fn reconcile(&mut self) -> anyhow::Result<()> {
        let mesh = self.mesh.load();
        self.again = self.aside(move |kept| kept.reconcile(&mesh)).await?;
        Ok(())
    }

    /// Enrols the pods that have come since.
    async fn enrol(&mut self) -> anyhow::Result<()> {
        let mesh = self.mesh.load();
        self.again = self.aside(move |kept| kept.enrol(&mesh)).await?;
        Ok(())
    }

    /// Takes account of what has changed in the mesh.
    async fn follow(&mut self) -> anyhow::Result<()> {
        let mesh = self.mesh.load();
        if let Some(again) = self.aside(move |kept| kept.follow(&mesh)).await? {
            self.again = again;
        }
        Ok(())
    }

    /// Follows the mesh and looks after programs and pins, until a successor is in charge, which waits for a word.
    /// Cancelling loses the enrolment: for the end of the process only.
    pub(super) async fn keep(&mut self, wishes: &mut mpsc::Receiver<Wish>) -> anyhow::Result<oneshot::Sender<()>> {
        let (mut generations, born) = (self.mesh.subscribe(), Arc::clone(&self.born));
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
                        let mesh = self.mesh.load();
                        let reclaimed = self.aside(move |kept| kept.reclaim(&mesh)).await?;
                        self.note(reclaimed.map(|()| Vec::new()));
                    }
                    Wish::Drain(done) => return Ok(done),
                },
                changed = generations.changed(), if !frozen => {
                    changed.context("the mesh's source has ended")?;
                    self.follow().await?;
                }
                () = sleep(self.again.unwrap_or_default()), if self.again.is_some() && !frozen => self.enrol().await?,
                () = born.notified(), if !frozen => self.enrol().await?,
                _ = forget.tick(), if !frozen => {
                    self.reconcile().await?;
                    let mesh = self.mesh.load();
                    self.aside(move |kept| kept.forget(&mesh)).await?;
                }
                _ = check.tick(), if !frozen => {
                    let mesh = self.mesh.load();
                    let checked = self.aside(move |kept| kept.check(&mesh)).await?;
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
            if let Err(error) = self.aside(move |kept| kept.enrolment.end_departed(&mesh)).await {
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
        work: impl FnOnce(&mut Kept) -> T + Send + 'static,
    ) -> anyhow::Result<T> {
        let mut kept = self.kept.take().context("the enrolment was lost")?;
        let (kept, result) = spawn_blocking(move || {
            let result = work(&mut kept);
            (kept, result)
        })
        .await?;
        self.kept = Some(kept);
        Ok(result)
    }
}
