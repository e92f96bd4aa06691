//! All files together: what they give at present.

use std::path::Path;
use std::sync::Arc;

use super::certificates::Bundle;
use super::crl::Crl;
use super::distrust::Distrust;
use super::files::{Watched, WatchedFolder};
use super::root::Root;
use super::settings::TrustSettings;
use crate::identity::TrustDomain;

/// The files.
pub(super) struct Files {
    bundles: Vec<Watched<Bundle>>,
    foreign: Vec<(TrustDomain, Watched<Bundle>)>,
    distrust: Option<Watched<Distrust>>,
    crls: Vec<WatchedFolder<Vec<Arc<Crl>>>>,
}

/// What files give.
#[derive(Default)]
pub(super) struct Given {
    pub(super) home: Vec<Arc<Root>>,
    pub(super) foreign: Vec<(TrustDomain, Vec<Arc<Root>>)>,
    pub(super) distrust: Distrust,
    pub(super) crls: Arc<[Arc<Crl>]>,
    pub(super) errors: Vec<(String, String)>,
}

impl Files {
    pub(super) fn new(settings: &TrustSettings) -> Self {
        let bundle = |path| Watched::new("the trust bundle", path, false);
        Self {
            bundles: settings.bundles.iter().map(|path| bundle(path)).collect(),
            foreign: settings
                .foreign
                .iter()
                .map(|(domain, path)| (domain.clone(), bundle(path)))
                .collect(),
            distrust: settings
                .distrust
                .as_ref()
                .map(|path| Watched::new("the list of what is distrusted", path, true)),
            crls: settings
                .crls
                .iter()
                .map(|path| WatchedFolder::new("the revocation lists", path))
                .collect(),
        }
    }

    /// Reads what has changed. Blocks.
    pub(super) fn look(&mut self) {
        let parse = |bytes: &[u8]| {
            let bundle = Bundle::parse(bytes)?;
            for reason in &bundle.ignored {
                tracing::warn!("a certificate of a trust bundle is left out: {reason}");
            }
            Ok(bundle)
        };
        let foreign = self.foreign.iter_mut().map(|(_, file)| file);
        for bundle in self.bundles.iter_mut().chain(foreign) {
            bundle.look(parse);
        }
        if let Some(distrust) = &mut self.distrust {
            distrust.look(Distrust::parse);
        }
        for folder in &mut self.crls {
            folder.look(|bytes| Ok(Crl::parse_file(bytes)?.into_iter().map(Arc::new).collect()));
        }
    }

    /// Why the list of what is distrusted cannot be used, and never could.
    pub(super) fn without_distrust(&self) -> Option<String> {
        let list = self.distrust.as_ref().filter(|list| list.good().is_none())?;
        Some(format!("{}: {}", list.path().display(), list.error()?))
    }

    /// What they give now.
    pub(super) fn given(&self) -> Given {
        let roots = |file: &Watched<Bundle>| file.good().map(|bundle| bundle.roots.clone()).unwrap_or_default();
        let mut foreign: Vec<(TrustDomain, Vec<Arc<Root>>)> = Vec::new();
        for (domain, file) in &self.foreign {
            match foreign.iter_mut().find(|(name, _)| name == domain) {
                Some((_, all)) => all.extend(roots(file)),
                None => foreign.push((domain.clone(), roots(file))),
            }
        }
        let error = |path: &Path, error: &str| (path.display().to_string(), error.to_owned());
        let bundles = self.bundles.iter().chain(self.foreign.iter().map(|(_, file)| file));
        let mut errors: Vec<_> = bundles
            .filter_map(|file| Some(error(file.path(), file.error()?)))
            .collect();
        errors.extend(
            self.distrust
                .iter()
                .filter_map(|file| Some(error(file.path(), file.error()?))),
        );
        errors.extend(
            self.crls
                .iter()
                .flat_map(WatchedFolder::errors)
                .map(|(path, reason)| error(path, reason)),
        );
        Given {
            home: self.bundles.iter().flat_map(roots).collect(),
            foreign,
            distrust: self
                .distrust
                .as_ref()
                .and_then(Watched::good)
                .cloned()
                .unwrap_or_default(),
            crls: self
                .crls
                .iter()
                .flat_map(WatchedFolder::good)
                .flatten()
                .cloned()
                .collect(),
            errors,
        }
    }
}

impl Given {
    /// Whether the revocation lists are the very same.
    pub(super) fn has_same_lists(&self, other: &Self) -> bool {
        let (one, other) = (&self.crls, &other.crls);
        one.len() == other.len() && one.iter().zip(other.iter()).all(|(one, other)| Arc::ptr_eq(one, other))
    }
}
