//! What to do about the certificates that gpupack makes, given what there is and the time.
//!
//! The CA is made once. Certificates are signed again when a third of their life has passed. The *bundle*, the
//! certificates of CAs that clients trust, is written wherever another one is.
//!
//! Nothing is remembered between two calls: what there is says what is due. So a process that ends at any point,
//! or loses the answer to a write, goes on. Writers see the CA *after* all other objects, and write an object only
//! in the version that they saw. So none of them takes back what another one wrote.

use std::collections::BTreeMap;
use std::time::Duration;

/// Seconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixTime(pub u64);

impl UnixTime {
    /// This long after.
    #[must_use]
    pub fn plus(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time.as_secs()))
    }

    /// This long before, not before 1970.
    #[must_use]
    pub fn minus(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(time.as_secs()))
    }
}

/// How far a clock may be from that of the API server. Certificates begin an hour early, so that less does no harm.
const CLOCKS_AGREE_WITHIN: u64 = 600;

/// Differences of clocks, by name. Steps are large: a text about a difference stays the same.
const DIFFERENCES: [(u64, &str); 5] = [
    (365 * 86_400, "more than a year"),
    (30 * 86_400, "more than a month"),
    (86_400, "more than a day"),
    (3_600, "more than an hour"),
    (CLOCKS_AGREE_WITHIN, "more than ten minutes"),
];

/// A clock that is too far from that of the API server to decide by it what has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongClock {
    pub by: &'static str,
    pub side: &'static str,
}

impl WrongClock {
    /// The clock of this machine, if it is wrong.
    pub fn found(own: UnixTime, of_server: UnixTime) -> Option<Self> {
        let far = own.0.abs_diff(of_server.0);
        let (_, by) = DIFFERENCES.into_iter().find(|(least, _)| far > *least)?;
        let side = if own > of_server { "ahead of" } else { "behind" };
        Some(Self { by, side })
    }
}

/// From when until when something is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first second.
    pub starts: UnixTime,
    /// The last second.
    pub ends: UnixTime,
}

impl Validity {
    /// Whether it is valid at this time.
    pub fn contains(&self, time: UnixTime) -> bool {
        (self.starts..self.ends).contains(&time)
    }
}

/// Who has a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CertificateOwner {
    /// All replicas of the extender.
    Extender,
    Scheduler,
    Webhook,
}

impl CertificateOwner {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Extender, Self::Scheduler, Self::Webhook];
}

/// Where the bundle is besides the Secrets with certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BundlePlace {
    /// The ConfigMap that agents read.
    Agents,
    /// The configuration by which the API server calls the webhook.
    Webhooks,
    /// The APIService by which the API server calls the extender.
    ApiService,
}

impl BundlePlace {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Agents, Self::Webhooks, Self::ApiService];
}

/// The Secret of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenCertificate {
    /// There is no such Secret.
    NoSecret,
    /// The Secret has no certificate that can be used.
    Unusable,
    Made {
        /// Until when it is valid.
        ends: UnixTime,
        /// Whether the CA that signs now has signed it.
        is_by_signer: bool,
        /// Whether the bundle beside it is the present one.
        has_bundle: bool,
    },
}

/// The bundle in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenBundle {
    /// There is no such object, or it may not be read.
    Absent,
    /// Another bundle, or none.
    Outdated,
    Current,
}

/// Everything that there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenObjects {
    /// When the CA is valid; `None`: there is none that can be used.
    pub ca: Option<Validity>,
    /// Whether the Secret has a CA that a version before was to sign with next.
    pub has_next_ca: bool,
    /// The certificates. An owner that is not here has no Secret.
    pub certificates: BTreeMap<CertificateOwner, SeenCertificate>,
    /// The bundle in other places. A place that is not here is absent.
    pub bundles: BTreeMap<BundlePlace, SeenBundle>,
}

/// One write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationStep {
    MakeCa,
    /// Sign a certificate that ends at this time, and write the bundle beside it.
    Sign(CertificateOwner, UnixTime),
    /// Write the bundle beside a certificate.
    AddBundle(CertificateOwner),
    Publish(BundlePlace),
    /// Forget the CA that was to sign next, and its key: clients go on trusting it.
    ForgetNextCa,
}

/// The writes that are due, in their order, where a certificate lasts for `life`. The CA is made alone: the others
/// are found when it is there. A CA that is not valid now stays, and nothing is due.
pub fn steps(seen: &SeenObjects, life: Duration, now: UnixTime) -> Vec<RotationStep> {
    let Some(ca) = &seen.ca else { return vec![RotationStep::MakeCa] };
    if !ca.contains(now) {
        return Vec::new();
    }
    let end = now.plus(life).min(ca.ends);
    let mut steps = Vec::new();
    for (owner, certificate) in &seen.certificates {
        match certificate {
            SeenCertificate::NoSecret => {}
            SeenCertificate::Unusable => steps.push(RotationStep::Sign(*owner, end)),
            SeenCertificate::Made { ends, is_by_signer, has_bundle } => {
                let is_due = now.plus(2 * life / 3) >= *ends && end > *ends;
                if is_due || !is_by_signer {
                    steps.push(RotationStep::Sign(*owner, end));
                } else if !has_bundle {
                    steps.push(RotationStep::AddBundle(*owner));
                }
            }
        }
    }
    let outdated = seen.bundles.iter().filter(|(_, bundle)| **bundle == SeenBundle::Outdated);
    steps.extend(outdated.map(|(place, _)| RotationStep::Publish(*place)));
    steps.extend(seen.has_next_ca.then_some(RotationStep::ForgetNextCa));
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Duration = Duration::from_secs(900);

    fn at(seconds: u64) -> UnixTime {
        UnixTime(seconds)
    }

    fn made(ends: u64) -> SeenCertificate {
        SeenCertificate::Made { ends: at(ends), is_by_signer: true, has_bundle: true }
    }

    /// A CA of 1000 to 10000, certificates until 5900, the bundle everywhere.
    fn seen() -> SeenObjects {
        SeenObjects {
            ca: Some(Validity { starts: at(1_000), ends: at(10_000) }),
            has_next_ca: false,
            certificates: CertificateOwner::ALL.map(|owner| (owner, made(5_900))).into(),
            bundles: BundlePlace::ALL.map(|place| (place, SeenBundle::Current)).into(),
        }
    }

    fn due(seen: &SeenObjects, now: u64) -> Vec<RotationStep> {
        steps(seen, LIFE, at(now))
    }

    #[test]
    fn a_clock_is_wrong_that_is_far_from_the_api_servers() {
        let found = |own, server| WrongClock::found(at(own), at(server));
        assert_eq!(found(10_000, 10_600), None);
        assert_eq!(found(10_600, 10_000), None);
        let ten = Some(WrongClock { by: "more than ten minutes", side: "ahead of" });
        assert_eq!(found(10_601, 10_000), ten);
        let year = Some(WrongClock { by: "more than a year", side: "behind" });
        assert_eq!(found(0, u64::MAX), year);
    }

    #[test]
    fn certificates_are_signed_again_at_a_third_of_their_life_and_made_where_they_are_missing() {
        let mut seen = seen();
        assert_eq!(due(&seen, 5_299), []);
        let all = CertificateOwner::ALL.map(|owner| RotationStep::Sign(owner, at(6_200)));
        assert_eq!(due(&seen, 5_300), all);
        seen.certificates.insert(CertificateOwner::Webhook, SeenCertificate::NoSecret);
        seen.certificates.insert(CertificateOwner::Extender, SeenCertificate::Unusable);
        assert_eq!(due(&seen, 5_000), [RotationStep::Sign(CertificateOwner::Extender, at(5_900))]);
    }

    #[test]
    fn no_certificate_outlives_its_ca_or_is_renewed_for_nothing() {
        let mut seen = seen();
        seen.ca = Some(Validity { starts: at(1_000), ends: at(6_000) });
        assert_eq!(due(&seen, 5_400)[0], RotationStep::Sign(CertificateOwner::Extender, at(6_000)));
        seen.certificates = CertificateOwner::ALL.map(|owner| (owner, made(6_000))).into();
        assert_eq!(due(&seen, 5_999), []);
    }

    #[test]
    fn what_is_of_another_ca_is_signed_again_and_another_bundle_is_replaced() {
        let mut seen = seen();
        let other = |is_by_signer| SeenCertificate::Made {
            ends: at(5_900),
            is_by_signer,
            has_bundle: false,
        };
        seen.certificates.insert(CertificateOwner::Extender, other(false));
        seen.certificates.insert(CertificateOwner::Webhook, other(true));
        seen.bundles.insert(BundlePlace::Agents, SeenBundle::Outdated);
        seen.bundles.insert(BundlePlace::ApiService, SeenBundle::Absent);
        seen.has_next_ca = true;
        let expected = [
            RotationStep::Sign(CertificateOwner::Extender, at(6_000)),
            RotationStep::AddBundle(CertificateOwner::Webhook),
            RotationStep::Publish(BundlePlace::Agents),
            RotationStep::ForgetNextCa,
        ];
        assert_eq!(due(&seen, 5_100), expected);
    }

    #[test]
    fn without_a_ca_one_is_made_and_one_that_is_not_valid_stays() {
        let mut seen = seen();
        seen.certificates.insert(CertificateOwner::Extender, SeenCertificate::Unusable);
        for now in [999, 10_000] {
            assert_eq!(due(&seen, now), []);
        }
        seen.ca = None;
        assert_eq!(due(&seen, 5_000), [RotationStep::MakeCa]);
    }
}
