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
		d, code, text := b.lookUp(e.GetReceiptHandle())
		if d != nil {
			b.remove(d)
			d.cursor.group.acked = append(d.cursor.group.acked, d.view())
			b.noteChange()
		}
		st := result(code, text)
		answer.Entries = append(answer.Entries, &v2.AckMessageResultEntry{
			MessageId:     e.GetMessageId(),
			ReceiptHandle: e.GetReceiptHandle(),
			Status:        st,
		})
		switch {
		case answer.Status == nil:
			answer.Status = st
		case answer.Status.GetCode() != code:
			answer.Status = result(v2.Code_MULTIPLE_RESULTS, "")
		}
	}
	if answer.Status == nil {
		answer.Status = result(v2.Code_INTERNAL_SERVER_ERROR, "ack message result is empty")
	}
	return answer, nil
}

// checkNames returns why a topic and group cannot be used, nil if they can. The
// caller holds mu.
func (b *Broker) checkNames(topic, group *v2.Resource) *v2.Status {
	if _, st := b.findTopic(topic); st != nil {
		return st
	}
	_, st := b.findGroup(group)
	return st
}

// ChangeInvisibleDuration hides a message for another while, counted from now, and
// gives it a new handle.
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
	d, code, text := b.lookUp(req.GetReceiptHandle())
	if d == nil {
		answer := &v2.ChangeInvisibleDurationResponse{Status: result(code, text)}
		if code == v2.Code_OK {
			answer.ReceiptHandle = req.GetReceiptHandle()
		}
		return answer, nil
	}
	b.hide(d, b.now(), invisible)
	b.noteVisible()
	return &v2.ChangeInvisibleDurationResponse{Status: result(v2.Code_OK, ""), ReceiptHandle: d.handle()}, nil
}
