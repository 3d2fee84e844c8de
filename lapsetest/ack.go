package lapsetest

import (
	"context"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// AckMessage ends deliveries. A handle that was acknowledged or replaced before
// gets OK, and nothing happens.
func (s *service) AckMessage(_ context.Context, req *v2.AckMessageRequest) (*v2.AckMessageResponse, error) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if st := b.checkNames(req.GetTopic(), req.GetGroup()); st != nil {
		return &v2.AckMessageResponse{Status: st}, nil
	}
	answer := &v2.AckMessageResponse{}
	for _, e := range req.GetEntries() {
		d, current, st := b.lookUp(e.GetReceiptHandle())
		if current {
			b.remove(d)
			d.cursor.group.acked = append(d.cursor.group.acked, d.view())
			b.noteChange()
		}
		answer.Entries = append(answer.Entries, &v2.AckMessageResultEntry{
			MessageId:     e.GetMessageId(),
			ReceiptHandle: e.GetReceiptHandle(),
			Status:        st,
		})
		switch {
		case answer.Status == nil:
			answer.Status = st
		case answer.Status.GetCode() != st.GetCode():
			answer.Status = result(v2.Code_MULTIPLE_RESULTS, "")
		}
	}
	if answer.Status == nil {
		answer.Status = result(v2.Code_INTERNAL_SERVER_ERROR, "ack message result is empty")
	}
	return answer, nil
}

// checkNames returns what is wrong with the names in an acknowledgement, nil if
// nothing is. A group that is not there is taken: the handle says it all. The caller
// holds mu.
func (b *Broker) checkNames(topic, group *v2.Resource) *v2.Status {
	if _, st := b.findGroup(group); st.GetCode() == v2.Code_ILLEGAL_CONSUMER_GROUP {
		return st
	}
	_, st := b.findTopic(topic)
	if st.GetCode() == v2.Code_TOPIC_NOT_FOUND {
		return result(v2.Code_INTERNAL_SERVER_ERROR, st.GetMessage())
	}
	return st
}

// ChangeInvisibleDuration hides a message for another while, counted from now, and
// gives it a new handle. With a handle that was replaced or acknowledged before, the
// message comes once more for each such call: measured on the real one, and the
// reason to keep the newest handle only.
func (s *service) ChangeInvisibleDuration(_ context.Context, req *v2.ChangeInvisibleDurationRequest) (*v2.ChangeInvisibleDurationResponse, error) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	invisible := req.GetInvisibleDuration().AsDuration()
	st := b.checkNames(req.GetTopic(), req.GetGroup())
	if st == nil {
		st = checkInvisible(invisible, 0)
	}
	if st != nil {
		return &v2.ChangeInvisibleDurationResponse{Status: st}, nil
	}
	d, current, st := b.lookUp(req.GetReceiptHandle())
	if d == nil {
		return &v2.ChangeInvisibleDurationResponse{Status: st}, nil
	}
	if !current {
		d = b.deliver(d.cursor, d.msg, d.attempt)
	}
	b.hide(d, b.now(), invisible)
	b.noteVisible()
	return &v2.ChangeInvisibleDurationResponse{Status: st, ReceiptHandle: d.handle()}, nil
}
