package lapsetest

// The message store. All functions here are called with Broker.mu held.
//
// A message goes from topic.timers (not yet due) to topic.log (due, in the order of
// delivery) and stays there. Each group has a cursor into the log; what it took and
// has not acknowledged is a delivery, hidden until its visibleAt.

import (
	"container/heap"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

const (
	defaultQueues = 8
	dlqPrefix     = "%DLQ%"
)

type topic struct {
	name    string
	typ     TopicType
	queues  int
	next    int     // the queue of the next message
	offsets []int64 // the next offset of each queue
	timers  timers
	log     []*message
	cursors map[string]*cursor // by group
}

type group struct {
	name    string
	retries int
	acked   []Message
	dead    []Message
}

// message is a stored message. It is not changed once it is stored.
type message struct {
	Message
	system *v2.SystemProperties // as sent
	due    time.Time            // rounded up; zero: at once
	tries  int                  // attempts that it brings along: of a dead letter only
	seq    int64                // order of arrival
	queue  int
	offset int64
}

type cursor struct {
	topic  *topic
	group  *group
	pos    int // topic.log[:pos] has been handed out at least once
	hidden deliveries
}

// delivery is a message that a group took and has not acknowledged.
type delivery struct {
	id        int64
	cursor    *cursor
	msg       *message
	attempt   int
	gen       int // of the newest handle
	expires   time.Time
	visibleAt time.Time
	done      bool // acknowledged or dead
	index     int  // in cursor.hidden, unless done
}

// timers is a heap by due instant, then by arrival.
type timers []*message

func (h timers) Len() int { return len(h) }
func (h timers) Less(i, j int) bool {
	if !h[i].due.Equal(h[j].due) {
		return h[i].due.Before(h[j].due)
	}
	return h[i].seq < h[j].seq
}
func (h timers) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *timers) Push(x any)   { *h = append(*h, x.(*message)) }
func (h *timers) Pop() any {
	old := *h
	m := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return m
}

// deliveries is a heap by the instant at which they show again.
type deliveries []*delivery

func (h deliveries) Len() int { return len(h) }
func (h deliveries) Less(i, j int) bool {
	if !h[i].visibleAt.Equal(h[j].visibleAt) {
		return h[i].visibleAt.Before(h[j].visibleAt)
	}
	return h[i].id < h[j].id
}
func (h deliveries) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *deliveries) Push(x any) {
	d := x.(*delivery)
	d.index = len(*h)
	*h = append(*h, d)
}
func (h *deliveries) Pop() any {
	old := *h
	d := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return d
}

// nameOf returns the name under which the server knows r: the namespace is a
// prefix, as in the real proxy.
func nameOf(r *v2.Resource) string {
	if r.GetResourceNamespace() == "" {
		return r.GetName()
	}
	return r.GetResourceNamespace() + "%" + r.GetName()
}

// ceil rounds t up to a multiple of p since the Unix epoch.
func ceil(t time.Time, p time.Duration) time.Time {
	ms, step := t.UnixMilli(), p.Milliseconds()
	if rest := ms % step; rest > 0 {
		ms += step - rest
	}
	return time.UnixMilli(ms)
}

// store puts m into its topic's timers or log.
func (b *Broker) store(t *topic, m *message) {
	b.lastID++
	m.seq = b.lastID
	m.StoredAt = b.now()
	m.queue = t.next % t.queues
	t.next++
	m.offset = t.offsets[m.queue]
	t.offsets[m.queue]++
	b.accepted = append(b.accepted, m)
	if m.DeliverAt.After(m.StoredAt) {
		m.due = ceil(m.DeliverAt, b.opts.precision)
		heap.Push(&t.timers, m)
	} else {
		t.log = append(t.log, m)
	}
	b.noteVisible()
}

// dispatch moves what is due from the timers to the log.
func (t *topic) dispatch(now time.Time) {
	for len(t.timers) > 0 && !t.timers[0].due.After(now) {
		t.log = append(t.log, heap.Pop(&t.timers).(*message))
	}
}

// cursorOf returns g's place in t; a group that is new to a topic begins at its
// first message.
func (t *topic) cursorOf(g *group) *cursor {
	c, ok := t.cursors[g.name]
	if !ok {
		c = &cursor{topic: t, group: g}
		t.cursors[g.name] = c
	}
	return c
}

// pop takes up to limit visible messages whose tag is wanted and hides them for
// invisible. died says how many were moved to the dead letters instead.
func (b *Broker) pop(c *cursor, limit int, invisible time.Duration, wanted func(tag string) bool) (taken []*delivery, died int) {
	now := b.now()
	c.topic.dispatch(now)
	take := func(d *delivery) {
		d.attempt++
		b.hide(d, now, invisible)
		taken = append(taken, d)
	}
	for len(taken) < limit && len(c.hidden) > 0 && !c.hidden[0].visibleAt.After(now) {
		d := c.hidden[0]
		if !c.mayTake(d.attempt) {
			b.bury(d)
			died++
			continue
		}
		take(d)
	}
	for ; len(taken) < limit && c.pos < len(c.topic.log); c.pos++ {
		m := c.topic.log[c.pos]
		if !wanted(m.Tag) {
			continue // skipped for good, as the real one does
		}
		d := b.deliver(c, m, m.tries)
		if !c.mayTake(d.attempt) {
			b.bury(d)
			died++
			continue
		}
		take(d)
	}
	if len(taken)+died > 0 {
		b.noteChange()
	}
	return taken, died
}

// mayTake reports whether a message with so many attempts behind it may be
// delivered once more: the first time and as often as the group retries.
func (c *cursor) mayTake(attempts int) bool { return attempts <= c.group.retries }

// deliver makes a delivery of m that is visible now.
func (b *Broker) deliver(c *cursor, m *message, attempts int) *delivery {
	b.lastID++
	d := &delivery{id: b.lastID, cursor: c, msg: m, attempt: attempts}
	b.deliveries[d.id] = d
	heap.Push(&c.hidden, d)
	return d
}

// hide makes d invisible until now+invisible and gives it a new handle.
func (b *Broker) hide(d *delivery, now time.Time, invisible time.Duration) {
	d.gen++
	d.expires = now.Add(invisible)
	d.visibleAt = d.expires.Add(b.opts.lag)
	heap.Fix(&d.cursor.hidden, d.index)
}

// remove takes d out of what its group has to do.
func (b *Broker) remove(d *delivery) {
	heap.Remove(&d.cursor.hidden, d.index)
	d.done = true
}

// bury moves d to the group's dead-letter topic, which exists from the first dead
// message on. The dead letter brings its attempts along, and one more: a group that
// reads it with no more retries than the dead one's passes it on to its own dead
// letters without having seen it. So does the real one.
func (b *Broker) bury(d *delivery) {
	b.remove(d)
	g := d.cursor.group
	g.dead = append(g.dead, d.view())
	name := dlqPrefix + g.name
	t, ok := b.topics[name]
	if !ok {
		t = newTopic(name, Normal, 1)
		b.topics[name] = t
	}
	dead := *d.msg
	dead.Topic = name
	dead.due = time.Time{}
	dead.tries = d.attempt + 1
	dead.queue = 0
	dead.offset = t.offsets[0]
	t.offsets[0]++
	t.log = append(t.log, &dead)
	b.noteVisible()
}

func newTopic(name string, typ TopicType, queues int) *topic {
	return &topic{name: name, typ: typ, queues: queues, offsets: make([]int64, queues), cursors: make(map[string]*cursor)}
}

// nextVisible returns when something will show for c if nothing else happens.
func (c *cursor) nextVisible() (time.Time, bool) {
	var at time.Time
	if len(c.topic.timers) > 0 {
		at = c.topic.timers[0].due
	}
	if len(c.hidden) > 0 && (at.IsZero() || c.hidden[0].visibleAt.Before(at)) {
		at = c.hidden[0].visibleAt
	}
	return at, !at.IsZero()
}

// view returns d's message with its attempt.
func (d *delivery) view() Message {
	m := d.msg.Message
	m.Attempt = d.attempt
	m.Group = d.cursor.group.name
	return m
}

// A handle says by itself when it expires, as the real one does: an expired handle
// is refused whether the message is still there or not.

const handlePrefix = "lapsetest"

func (d *delivery) handle() string {
	return fmt.Sprintf("%s %d %d %d", handlePrefix, d.id, d.gen, d.expires.UnixMilli())
}

// lookUp returns the delivery behind a handle that has not expired, and whether the
// handle is the newest one of a delivery that is not done; nil if the handle is
// refused.
func (b *Broker) lookUp(handle string) (d *delivery, current bool, st *v2.Status) {
	malformed := result(v2.Code_INTERNAL_SERVER_ERROR, "illegal receipt handle: "+handle)
	f := strings.Split(handle, " ")
	if len(f) != 4 || f[0] != handlePrefix {
		return nil, false, malformed
	}
	id, err1 := strconv.ParseInt(f[1], 10, 64)
	gen, err2 := strconv.Atoi(f[2])
	expires, err3 := strconv.ParseInt(f[3], 10, 64)
	if d = b.deliveries[id]; err1 != nil || err2 != nil || err3 != nil || d == nil {
		return nil, false, malformed
	}
	if !b.now().Before(time.UnixMilli(expires)) {
		return nil, false, result(v2.Code_INVALID_RECEIPT_HANDLE, "receipt handle is expired")
	}
	return d, !d.done && d.gen == gen, result(v2.Code_OK, "")
}

func recallHandle(m *message) string {
	return base64.URLEncoding.EncodeToString(fmt.Appendf(nil, "v1 %s %s %d %s", m.Topic, brokerName, m.DeliverAt.UnixMilli(), m.ID))
}

// recall takes the message of a handle out of the timers, if it is there.
func (b *Broker) recall(handle string) (id string, code v2.Code, text string) {
	if !b.opts.recall {
		return "", v2.Code_INTERNAL_SERVER_ERROR, "recall failed, operation is forbidden"
	}
	raw, err := base64.URLEncoding.DecodeString(handle)
	f := strings.Split(string(raw), " ")
	if err != nil || len(f) != 5 || f[0] != "v1" {
		return "", v2.Code_INTERNAL_SERVER_ERROR, "recall handle is invalid"
	}
	at, err := strconv.ParseInt(f[3], 10, 64)
	t := b.topics[f[1]]
	if err != nil || t == nil {
		return "", v2.Code_INTERNAL_SERVER_ERROR, "recall handle is invalid"
	}
	if at <= b.now().UnixMilli() {
		return "", v2.Code_INTERNAL_SERVER_ERROR, "timestamp invalid"
	}
	t.timers = slices.DeleteFunc(t.timers, func(m *message) bool { return m.ID == f[4] })
	heap.Init(&t.timers)
	b.noteVisible()
	return f[4], v2.Code_OK, ""
}
