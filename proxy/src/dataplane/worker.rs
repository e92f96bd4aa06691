//! The threads that carry connections.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::{JoinSet, LocalSet};

use super::accept::accept_all;
use super::{Dataplane, inbound, outbound};
use crate::hbone::{HboneSettings, Pool};
use crate::node::{LocalPod, PodListeners, PodServer};

/// What a worker's connections share.
pub(super) struct Worker {
    pub(super) plane: Arc<Dataplane>,
    pub(super) pool: Rc<Pool>,
    pub(super) hbone: Rc<HboneSettings>,
    pub(super) rng: RefCell<fastrand::Rng>,
}

enum Command {
    Add(Arc<LocalPod>, PodListeners),
    Remove(Arc<str>),
    Stop,
}

/// The workers.
pub struct Workers {
    commands: Vec<mpsc::UnboundedSender<Command>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    /// Starts `count` workers.
    pub fn start(plane: &Arc<Dataplane>, count: usize) -> io::Result<Self> {
        let mut workers = Self {
            commands: Vec::new(),
            threads: Mutex::default(),
        };
        for number in 0..count {
            let (commands, received) = mpsc::unbounded_channel();
            let plane = Arc::clone(plane);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let thread = thread::Builder::new()
                .name(format!("adit-worker-{number}"))
                .spawn(move || LocalSet::new().block_on(&runtime, run(plane, received)))?;
            workers.commands.push(commands);
            workers
                .threads
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(thread);
        }
        Ok(workers)
    }

    /// Ends the workers' connections, each with a reset, and waits for the threads.
    pub fn stop(&self) {
        for worker in &self.commands {
            // One that has ended has stopped.
            let _ = worker.send(Command::Stop);
        }
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker has panicked");
            }
        }
    }
}

impl PodServer for Workers {
    fn added(&self, pod: &Arc<LocalPod>, listeners: Vec<PodListeners>) {
        for (worker, listeners) in self.commands.iter().zip(listeners) {
            if worker.send(Command::Add(Arc::clone(pod), listeners)).is_err() {
                tracing::error!("a worker has ended; pod {} is not served", pod.uid());
            }
        }
    }

    fn removed(&self, uid: &str) {
        for worker in &self.commands {
            // A worker that has ended serves nothing any more.
            let _ = worker.send(Command::Remove(uid.into()));
        }
    }
}

async fn run(plane: Arc<Dataplane>, mut commands: mpsc::UnboundedReceiver<Command>) {
    let worker = Rc::new(Worker {
        hbone: Rc::new(plane.settings.hbone.clone()),
        plane,
        pool: Rc::default(),
        rng: RefCell::new(fastrand::Rng::new()),
    });
    let mut pods: HashMap<Arc<str>, JoinSet<()>> = HashMap::new();
    let mut generations = worker.plane.mesh.subscribe();
    let mut draining = worker.plane.draining.clone();
    let mut drained = false;
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(Command::Add(pod, listeners)) => match serve(&worker, &pod, listeners) {
                    Ok(tasks) => drop(pods.insert(Arc::clone(pod.uid()), tasks)),
                    Err(error) => tracing::error!("pod {} is not served: {error}", pod.uid()),
                },
                Some(Command::Remove(uid)) => {
                    pods.remove(&uid);
                    worker.pool.forget_source(&uid);
                }
                Some(Command::Stop) | None => return,
            },
            Ok(()) = generations.changed() => {
                let mesh = worker.plane.mesh.load();
                worker.pool.retain_destinations(|uid| mesh.workload_by_uid(uid).is_some());
            }
            Ok(_) = draining.wait_for(|draining| *draining), if !drained => {
                drained = true;
                worker.pool.clear();
            }
        }
    }
}

fn serve(worker: &Rc<Worker>, pod: &Arc<LocalPod>, listeners: PodListeners) -> io::Result<JoinSet<()>> {
    let mut tasks = JoinSet::new();
    let (w, p) = (Rc::clone(worker), Arc::clone(pod));
    tasks.spawn_local(accept_all(
        w,
        p,
        TcpListener::from_std(listeners.outbound)?,
        outbound::serve,
    ));
    let (w, p) = (Rc::clone(worker), Arc::clone(pod));
    tasks.spawn_local(accept_all(
        w,
        p,
        TcpListener::from_std(listeners.hbone)?,
        inbound::serve_tunnel,
    ));
    let (w, p) = (Rc::clone(worker), Arc::clone(pod));
    tasks.spawn_local(accept_all(
        w,
        p,
        TcpListener::from_std(listeners.plaintext)?,
        inbound::serve_plaintext,
    ));
    Ok(tasks)
}
