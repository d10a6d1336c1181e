//! Faults that tests switch on, to show that the checks of the simulation notice them.
//!
//! Each is a mistake that was made here once, or that a change could make. A program that is built
//! without the feature `mutations` cannot switch one on: `mutated` is a constant there. With it
//! only code of a test can, and only for its own thread.

macro_rules! mutations {
    ($($(#[doc = $text:literal])+ $name:ident,)+) => {
        /// A fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutation {
            $($(#[doc = $text])+ $name,)+
        }

        impl Mutation {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// What is wrong, in a sentence.
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($text),+),)+
                }
            }
        }
    };
}

mutations! {
    /// No waiting pod is fenced at the start.
    NoStartFence,
    /// A fence at the start that is refused counts as written.
    RefusedFenceCounts,
    /// A pod that the fence at the start finds bound is not taken in.
    BoundAtStartUnseen,
    /// Calls are answered before the fence at the start is complete.
    AnswersBeforeFence,
    /// An undecided Binding is given up.
    UndecidedForgotten,
    /// A Binding that has not arrived counts as failed, without a fence.
    UndecidedUnfenced,
    /// A Binding is settled by a fence on any version of the pod.
    SettledOnAnyVersion,
    /// Bindings that no caller waits for are not settled.
    AbandonedUnsettled,
    /// A reservation without an answer is released after five seconds.
    ReservationTimesOut,
    /// A reservation is taken back also if the pod is bound.
    ConfirmedForgotten,
    /// A pod that another Binding bound is not taken in.
    OtherBindingUnseen,
    /// A Binding is posted on a version that another process wrote.
    ForeignVersionBound,
    /// A Binding is posted again on a version that another process fenced meanwhile.
    ForeignVersionAdopted,
    /// A guest goes home while another one that leaves uses the memory there.
    LeavingUseIgnored,
    /// What a list shows of a pod that is not known yet counts as used by others when it is.
    ListedUseForgotten,
    /// A placement is written over that of a later process.
    LaterPlacementOverwritten,
    /// A Binding is posted after kube-scheduler has given up.
    LateBind,
    /// A Binding is posted after the process began to stop.
    StopIgnored,
    /// A pod is bound to a node that *filter* did not pass.
    UnpassedBind,
    /// A pod without a GPU is not bound during the start, although *filter* passes it.
    PlainPodWaits,
    /// An undecided Binding of a pod counts against the pod when *filter* is called again.
    OwnRoomCounts,
    /// A Binding names no version of the pod.
    BindWithoutVersion,
    /// A Binding names no UID of the pod.
    BindWithoutUid,
    /// Two binds of a pod run at once.
    NoBindLock,
    /// A pod that is gone counts as never bound, although its Binding may have succeeded.
    GoneIsUnbound,
    /// *bind* trusts a hold without looking whether it still fits.
    HoldTrusted,
    /// Room is held beyond its time.
    HoldsStay,
    /// Room is held for pods that the watch does not show.
    HoldForMadeUp,
    /// Room is held again and again for a pod that is never bound.
    HoldsUnlimited,
    /// A pod is bound although guests still run in its room.
    GuestsIgnored,
    /// A guest counts as gone from a device as soon as its restart is requested.
    RestartBelieved,
    /// One list of processes without a guest is enough, whatever its container does.
    OneCleanList,
    /// Guests are not called home when their room is allocated.
    GuestsStay,
    /// A move that an earlier process began is not completed.
    MoveAbandoned,
    /// A pod is bound although others use the memory that it requests, and are to give it back.
    LentMemoryIgnored,
    /// Memory that others request is not taken back.
    LentMemoryStays,
    /// A pod starts although the limits of others do not leave its memory free yet.
    LimitsUnconfirmed,
    /// The agent reports lower limits as in force, and sets none.
    LimitsNotLowered,
    /// Memory counts as back as soon as it is to be taken back.
    TakeBackBelieved,
    /// Pods that use more than they request are restarted whether memory is missing or not.
    TakesBackUnneeded,
    /// A pod whose memory MPS limits is restarted for it, and may take as much again.
    LimitStays,
    /// Pods are restarted whose owner has not allowed that.
    RestartsUnasked,
    /// A pod is restarted for memory as often as it takes that again.
    RestartsUnlimited,
    /// A guest moves home although others use the memory that it requests there.
    HomeMemoryIgnored,
    /// A team gets more than it may have.
    TeamLimitUnchecked,
    /// Pods within what is guaranteed to their team are evicted for pods of other teams.
    GuaranteeIgnored,
    /// A pod of a group is bound although the group is not complete.
    GroupIgnored,
    /// Pods are evicted that their class of workloads protects.
    ProtectionIgnored,
    /// Pods are evicted for one that is only as important.
    PreemptsEqual,
    /// A process forgets the room that an earlier one was making.
    RoomNotResumed,
    /// A process that was frozen goes on to evict pods for one on which a later process has written.
    FrozenEvicts,
    /// A leader does not go on with room whose note the watch shows only after it began to lead.
    LateRoomNoteIgnored,
    /// After pods were evicted for one in vain, others follow at once.
    SecondVictims,
    /// A standing hold stays when its pod is bound or gone.
    StandingStays,
    /// A pod does not see the room that is kept for it.
    StandingUnseen,
    /// A pod is not requeued when all of the room kept for it is free.
    StandingUntold,
    /// A requeue is not written.
    RequeueLost,
    /// The room is forgotten when a requeue fails.
    FailedRequeueForgotten,
    /// A requeue overwrites the fence of a later process.
    RequeueOverFence,
    /// Room that appears is not noticed.
    RoomLost,
    /// One pod is requeued for a room, whether it can use it or not.
    OneTryPerRoom,
    /// Room that appeared before the watch showed a refused pod is not looked for.
    LateRoomLost,
    /// One report without its processes frees the devices of an ended pod.
    OneCleanReport,
    /// A report that does not cover the devices of an ended pod frees them.
    UncoveredReportFrees,
    /// The devices of an ended pod are free at once.
    DrainsAreFree,
    /// Processes of pods that ended before the start count for nothing.
    LeftoversIgnored,
    /// A device of the inventory is free although no report has said what is used of it.
    UnreadIsFree,
    /// What was sent while the process was frozen counts as a new report.
    FrozenReportTaken,
    /// A report of an earlier session is taken.
    OldSessionTaken,
    /// A report that comes twice or late is taken.
    RepeatedReportTaken,
    /// A node whose agent does not report takes pods.
    SilentNodeTakesPods,
    /// A node may name the devices of another one as its own.
    DeviceOfOtherNodeTaken,
    /// A list leaves pods that are gone where they are.
    RelistKeepsGone,
    /// A late event brings an ended pod back.
    EndedPodComesBack,
    /// What is written on a bound pod by other clients is believed.
    EditBelieved,
    /// A placement that another client edited is not written back.
    EditNotRestored,
    /// A removed pod stays in the sums of its devices.
    StaleSums,
    /// Pods are evicted for a pod that requests a GPU.
    PreemptsForGpu,
    /// Over-limit pods are evicted although the operator did not configure that.
    EvictsUnasked,
    /// A pod within its share is evicted.
    EvictsWithinShare,
    /// A replica writes although its term has ended.
    TermUnchecked,
    /// A replica answers although its term has ended.
    StaleAnswer,
    /// A replica takes the Lease before it has expired.
    LeaseTakenEarly,
    /// A Binding is posted before the followers know of it.
    UnannouncedBind,
    /// A Binding does not wait until the Lease no longer names a follower that is lost.
    LostFollowerForgotten,
    /// The Lease names a follower that does not know what was posted while it joined.
    NamedTooEarly,
    /// A follower that joins does not hear of Bindings that have just ended.
    RecentUntold,
    /// A follower takes messages although its watch may be behind.
    MessageTakenUnlisted,
    /// A replica that was not informed counts as informed when it takes over.
    UninformedTrusted,
    /// What the last leader named is not fenced.
    KnownUnfenced,
    /// A take-over does not wait for reports of nodes where a pod may have run unseen.
    UnseenRunForgotten,
    /// A pod that a fence has found bound is not listed again, although it may be gone since.
    LateFenceBelieved,
    /// A leader gives the Lease away while its binds go on.
    HandsOverAtOnce,
    /// A pod gets a MIG instance that was made for another one, and may be about to go.
    OldInstanceGiven,
    /// A pod loses its MIG instance when the agent does not know any more that it made it.
    ForgottenInstanceFreed,
    /// A pod gets a MIG instance that another pod has had since before a boot.
    NamedInstanceGiven,
    /// The place of a MIG instance that is promised and not made yet is free.
    PromisedPlaceFree,
    /// A pod is bound before its MIG instance is made.
    UnmadeBound,
    /// A pod is bound to a MIG instance that has gone since it was chosen.
    GoneInstanceBound,
    /// The new UUID of a MIG instance that was made again is not written on its pod.
    MadeAgainUnwritten,
    /// The new UUID of a MIG instance is written as late as what another client edited again and again.
    MadeAgainLate,
    /// A leader writes the MIG instances that it knows over those that an earlier one knew, though no report says yet
    /// which are newer.
    OlderInstanceWritten,
    /// Pods that wait do not hear that a MIG instance can be made.
    PlaceUnnoticed,
    /// A MIG instance that no pod has stays.
    IdleInstanceStays,
    /// A MIG instance that others made is removed.
    ForeignInstanceRemoved,
    /// A MIG instance stays that was taken over from others.
    TakenOverStays,
    /// An agent obeys a leader that was replaced.
    OldOrdersObeyed,
    /// A node takes pods while its driver is upgraded.
    UpgradeIgnored,
    /// A node takes pods while MIG Manager changes its GPUs.
    MigChangeIgnored,
    /// Pods that wait do not hear that the driver of a node is upgraded.
    UpgradeEndUnnoticed,
    /// Agents do not hear that they are to close the driver.
    LibraryStaysOpen,
    /// An agent opens the driver when the extender that had it closed does not answer.
    ClosingForgotten,
    /// A node takes pods whatever became of the last ones.
    BlindStartsIgnored,
    /// A node whose pods were blind takes one as a trial after a minute.
    TrialTooEarly,
    /// A node whose pods were blind takes several as a trial.
    TrialsUnlimited,
    /// A node whose pods were blind takes none, though its agent was made again.
    BlindNodeStays,
    /// Ages of pods are by the clock of the machine on which the extender runs.
    OwnClockTrusted,
}

#[cfg(feature = "mutations")]
std::thread_local! {
    static ACTIVE: std::cell::Cell<Option<Mutation>> = const { std::cell::Cell::new(None) };
}

/// Switches a fault on in this thread, and every other one off.
#[cfg(feature = "mutations")]
pub fn mutate(fault: Option<Mutation>) {
    ACTIVE.set(fault);
}

/// Whether this fault is switched on.
#[cfg(feature = "mutations")]
pub fn mutated(fault: Mutation) -> bool {
    ACTIVE.get() == Some(fault)
}

/// Whether this fault is switched on: never in a program.
#[cfg(not(feature = "mutations"))]
pub const fn mutated(_: Mutation) -> bool {
    false
}
